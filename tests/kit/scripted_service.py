"""A GenerationService whose answers are written by the test: the seam between front end and router."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from tests.kit.codec import NAMES, chunks_of, tokens_of

HANG = "hang"  # a step that never comes
Step = TokenChunk | Exception | str | float  # a float: that many seconds pass
Script = Callable[[GenerationRequest], Sequence[Step]]
WAIT_S = 5.0


def says(text: str) -> Script:
    """Answers every request with this text, one token per chunk."""
    return lambda _: chunks_of(tokens_of(text))


class ScriptedService:
    """Plays the script of the moment; counts what became of each stream. Events make waiting for an abort exact."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.script: Script = says("Hello")
        self.is_up = True
        self.requests: list[GenerationRequest] = []
        self.num_aborted = 0
        self.num_ended = 0
        self._changed = threading.Condition()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        is_ended = False
        try:
            for step in self.script(request):
                if isinstance(step, str):
                    await asyncio.Event().wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    is_ended = True
                    raise step
                else:
                    await asyncio.sleep(0)
                    yield step
            is_ended = True
        finally:
            with self._changed:
                self.num_ended += is_ended
                self.num_aborted += not is_ended
                self._changed.notify_all()

    def model_names(self) -> Sequence[str]:
        return NAMES

    async def unready_reasons(self) -> Sequence[str]:
        return () if self.is_up else ("the script says so",)

    def wait_until_started(self, num_requests: int = 1) -> None:
        """Block until so many streams were opened."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= num_requests, WAIT_S), len(self.requests)

    def wait_until_over(self, num_requests: int = 1) -> None:
        """Block until so many streams are over, one way or the other."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_aborted + self.num_ended >= num_requests, WAIT_S), (
                f"{self.num_aborted} aborted and {self.num_ended} ended of {num_requests}"
            )
