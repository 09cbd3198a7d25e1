"""Who may come in: a bound on requests in flight, and on the tokens one request may take."""

from collections.abc import Iterator
from contextlib import contextmanager

from dsv4_cluster.errors import InvalidRequestError, OverloadedError, PromptTooLongError
from dsv4_cluster.protocol.request import GenerationRequest


class Admission:
    """Counts requests in flight. Belongs to one event loop."""

    def __init__(self, *, max_in_flight: int, max_model_len: int) -> None:
        """max_in_flight: requests. max_model_len: prompt + answer, in tokens."""
        self._max_in_flight = max_in_flight
        self._max_model_len = max_model_len
        self.num_in_flight = 0

    @property
    def has_room(self) -> bool:
        """True when one more request would be let in."""
        return self.num_in_flight < self._max_in_flight

    def fullness(self) -> str:
        """How full it is, for messages."""
        return f"{self.num_in_flight} requests are in flight, router.max_ongoing_requests is {self._max_in_flight}"

    def check(self, request: GenerationRequest) -> None:
        """Raises: InvalidRequestError for an empty prompt or answer, PromptTooLongError with the numbers."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt == 0:
            raise InvalidRequestError("the prompt is empty: at least one token is needed")
        if max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {max_tokens}, expected at least 1")
        if request.max_total_tokens > self._max_model_len:
            raise PromptTooLongError(
                f"{num_prompt} prompt tokens and {max_tokens} for the answer exceed the limit of "
                f"{self._max_model_len} tokens"
            )

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place for the length of the block. Raises: OverloadedError when all are taken."""
        if not self.has_room:
            raise OverloadedError(f"{self.fullness()}; try again later")
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
