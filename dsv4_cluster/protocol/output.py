"""What comes back from an engine, one chunk per sequence and step."""

from dataclasses import dataclass
from enum import StrEnum

from dsv4_cluster.errors import Dsv4Error, WorkerLostError

TokenLogprobs = dict[int, float]  # token id -> natural-log probability; always holds the chosen token
PromptLogprobs = list[TokenLogprobs | None]  # index = prompt position; [0] is None


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the client left
    ERROR = "error"  # see TokenChunk.error


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of one sequence from one step. Stop tokens are included in token_ids; consumers drop EOS."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one entry per token id
    prompt_logprobs: PromptLogprobs | None = None  # once, on the chunk with the first token
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the id that ended it, when finish_reason is STOP
    num_cached_tokens: int = 0
    num_drafted: int = 0  # drafts that this step checked
    num_accepted: int = 0  # those of them that are in token_ids
    error: Dsv4Error | None = None

    def raise_if_failed(self) -> None:
        """Raises: the error it carries; WorkerLostError when the engine dropped a request that nobody cancelled."""
        if self.error is not None:
            raise self.error
        if self.finish_reason is FinishReason.ABORT:
            raise WorkerLostError(f"{self.request_id}: the engine dropped the request")
        if self.finish_reason is FinishReason.ERROR:
            raise Dsv4Error(f"{self.request_id}: the engine failed without saying why")
