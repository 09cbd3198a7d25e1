"""Plans and results of one engine step: frozen, printable, comparable."""

from dataclasses import dataclass

from dsv4_cluster.protocol.output import TokenChunk


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, end) of one sequence are computed; `samples` when `end` reaches the sequence's last token.

    Drafts follow the last token: the scheduler says how many there may be, the proposer which ones there are.
    """

    request_id: str
    start: int
    end: int
    samples: bool
    num_drafts: int = 0
    draft_token_ids: tuple[int, ...] = ()  # empty until proposed; then num_drafts is their number

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, drafts included."""
        return self.end - self.start + self.num_drafts


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Preempted sequences lost their pages and wait again."""

    step_id: int
    scheduled: tuple[ScheduledChunk, ...]
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced; `chunks` is empty for a step that only computed part of a prompt."""

    step_id: int
    chunks: tuple[TokenChunk, ...] = ()
    num_tokens: int = 0
