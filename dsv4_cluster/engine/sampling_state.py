"""What sampling remembers of one sequence: its logit edits and where its thoughts are. It grows by a step per token."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_cluster.sampling.processors import LogitEdits


@dataclass(slots=True)
class Thoughts:
    """The thoughts of an answer, from its first token to </think>.

    `budget` counts the generated tokens before </think>: when it is spent, </think> is forced. Where the caller wants
    more than the thoughts, EOS inside them would be an answer without content, so </think> is taken in its place.
    """

    end_token_id: int  # </think>
    budget: int | None
    eos_token_id: int | None  # taken as </think>; None = EOS ends the answer as it does anywhere
    is_open: bool = True
    num_tokens: int = 0

    def add(self, token_id: int) -> None:
        """Take in one final token."""
        if self.is_open:
            self.num_tokens += 1
            self.is_open = token_id != self.end_token_id

    def is_open_after(self, draft_token_ids: Sequence[int]) -> bool:
        """True when the token after these drafts is still a thought."""
        return self.is_open and self.end_token_id not in draft_token_ids

    def forced_token_id(self, num_drafts: int) -> int | None:
        """</think> once the budget is spent; only while the thoughts are open."""
        is_spent = self.budget is not None and self.num_tokens + num_drafts >= self.budget
        return self.end_token_id if is_spent else None

    @property
    def replaced_token(self) -> tuple[int, int] | None:
        """(EOS, </think>) where EOS does not end the answer; only while the thoughts are open."""
        return None if self.eos_token_id is None else (self.eos_token_id, self.end_token_id)


@dataclass(slots=True)
class SamplingState:
    """Both parts are None for a sequence that needs neither."""

    edits: LogitEdits | None
    thoughts: Thoughts | None
    num_seen: int  # tokens of the sequence taken in; the prompt is when the state is made

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that became final since the last call."""
        for token_id in token_ids[self.num_seen :]:
            if self.edits is not None:
                self.edits.add(token_id)
            if self.thoughts is not None:
                self.thoughts.add(token_id)
        self.num_seen = len(token_ids)
