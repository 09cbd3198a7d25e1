"""Plans and results of one engine step: frozen, printable, comparable."""

from dataclasses import dataclass

from dsv4_cluster.protocol.output import TokenChunk


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, end) of one sequence are computed; `samples` when `end` reaches the sequence's last token."""

    request_id: str
    start: int
    end: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


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
