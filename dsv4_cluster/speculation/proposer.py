"""The seam between the engine and whatever guesses tokens ahead of the main model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dsv4_cluster.sampling.batch import SamplingRow


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence that wants drafts. All its tokens but the last one are in the cache."""

    token_ids: Sequence[int]  # prompt and answer so far, at least two; not to be changed
    slot: int  # of the sequence's rings
    num_drafts: int  # >= 1
    sampling_row: Callable[[Sequence[int]], SamplingRow]  # how the token after these drafts is chosen
    prepare: Callable[[Sequence[int]], None]  # start in the background what `sampling_row` of these drafts will need


class Proposer(Protocol):
    """Guesses tokens. A wrong guess costs time and never changes an answer."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Guess the tokens after each row's last one. Returns: at most `num_drafts` token ids per row."""
        ...
