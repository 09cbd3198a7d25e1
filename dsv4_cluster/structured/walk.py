"""The masks of one answer in one step: in front of its next token, and behind each draft that the grammar takes."""

from collections.abc import Sequence

import numpy as np

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.structured.bitmask import PackedMask, is_allowed, num_words
from dsv4_cluster.structured.matcher import Matcher


class DraftWalk:
    """Takes a matcher along drafts, computing each mask once however the drafts come, and back with `end`.

    | row i           | the token after drafts[:i]                                        |
    |-----------------|-------------------------------------------------------------------|
    | a mask          | must be one of these                                              |
    | None            | is free: thoughts                                                 |
    | there is none   | cannot be accepted: the grammar refuses a draft in front of it    |
    | index of error  | is unknown: the parser ran into its limits, see `error`           |
    """

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        """matcher: stands behind the last final token; nobody else may use it before `end`."""
        self._matcher = matcher
        self._num_words = num_words(vocab_size)
        self._taken: list[int] = []
        self._rows: list[PackedMask | None] = []
        self.error: InvalidRequestError | None = None  # met at the first row that is missing; the matcher is lost then

    def rows(self, draft_token_ids: Sequence[int]) -> tuple[PackedMask | None, ...]:
        """Masks [num_words] int32 in front of the first draft and behind each one up to the first refused one.

        Drafts may continue those of an earlier call or leave them.
        """
        if self.error is None:
            try:
                self._follow(draft_token_ids)
            except InvalidRequestError as err:
                self.error = err
        return tuple(self._rows[: 1 + _num_common(self._taken, draft_token_ids)])

    def end(self) -> None:
        """Put the matcher back where it was."""
        self._go_back_to(0)

    def _follow(self, draft_token_ids: Sequence[int]) -> None:
        self._go_back_to(_num_common(self._taken, draft_token_ids))
        if not self._rows:
            self._rows.append(self._mask())
        for token_id in draft_token_ids[len(self._taken) :]:
            if self._rows[-1] is not None and not is_allowed(self._rows[-1], token_id):
                return
            self._matcher.accept(token_id)
            self._taken.append(token_id)
            self._rows.append(self._mask())

    def _mask(self) -> PackedMask | None:
        if self._matcher.is_free:
            return None
        mask = np.empty(self._num_words, dtype=np.int32)
        self._matcher.mask(mask)
        return mask

    def _go_back_to(self, num_taken: int) -> None:
        self._matcher.rollback(len(self._taken) - num_taken)
        del self._taken[num_taken:], self._rows[num_taken + 1 :]


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
