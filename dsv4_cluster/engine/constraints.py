"""Structured output inside the engine: grammars compiled and masks computed on threads while the forward pass runs.

One step: `begin` names the rows that will be sampled, the forward pass runs, `collect` returns their masks, and after
the commit `accept` advances the matchers. A matcher belongs to the request, not to its pages, so preemption does not
touch it. What goes wrong with one grammar ends that request and no other.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dsv4_cluster.errors import Dsv4Error, InvalidRequestError
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.structured.bitmask import PackedMask, num_words
from dsv4_cluster.structured.grammar import GrammarCache
from dsv4_cluster.structured.matcher import Matcher
from dsv4_cluster.structured.vocabulary import GrammarVocabulary
from dsv4_cluster.tokenizer.text import TextTokenizer

COMPILE_THREADS = 2
COMPILE_LIMIT_S = 10.0  # a step waits no longer for a grammar; usual ones take milliseconds


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of one sequence in one step. Row 0 is for its next token, row i for the one after i drafts.

    Rows stop at the first draft that the grammar refuses: nothing after it can be accepted.
    """

    allowed: torch.Tensor | None = None  # [1 + usable drafts, W] int32, see bitmask.py; None = all rows are free
    num_free: int = 0  # rows from the first one on that have no constraint yet: thoughts
    error: Dsv4Error | None = None  # the constraint cannot be followed; the request ends with it

    def row(self, index: int) -> torch.Tensor | None:
        """[W] int32 for one row, None where everything is allowed or no token can be accepted."""
        is_masked = self.allowed is not None and self.num_free <= index < len(self.allowed)
        return self.allowed[index] if self.allowed is not None and is_masked else None


FREE = RowMasks()


@dataclass(frozen=True, slots=True)
class _Constraint:
    """One constrained request."""

    request: GenerationRequest
    matcher: Future[Matcher]


class Constraints:
    """All constrained requests of one engine. Its methods belong to the engine's thread."""

    def __init__(
        self, checkpoint_dir: Path | None, *, vocab_size: int, eos_token_id: int, device: torch.device
    ) -> None:
        """checkpoint_dir: where tokenizer.json is; it is read when the first constrained request comes."""
        self._checkpoint_dir = checkpoint_dir
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._device = device
        self._cache: GrammarCache | None = None
        self._cache_lock = threading.Lock()
        self._constraints: dict[str, _Constraint] = {}
        self._errors: dict[str, Dsv4Error] = {}  # of requests that `accept` has to end
        self._pending: Future[dict[str, RowMasks]] | None = None
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar-compile")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")

    def request_ids(self) -> set[str]:
        """The requests that have a constraint."""
        return set(self._constraints)

    def add(self, request: GenerationRequest, generated_token_ids: Sequence[int] = ()) -> None:
        """Start compiling for a request that has a constraint; others are ignored.

        generated_token_ids: what another engine generated already. Raises: InvalidRequestError.
        """
        if request.structured is None:
            return
        if request.stop.ignore_eos:
            raise InvalidRequestError("ignore_eos cannot be combined with a constrained answer, which EOS ends")
        if self._checkpoint_dir is None:
            raise InvalidRequestError("this model has no tokenizer, so its answers cannot be constrained")
        matcher = self._compilers.submit(self._new_matcher, request, tuple(generated_token_ids))
        self._constraints[request.request_id] = _Constraint(request, matcher)

    def begin(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Compute masks in the background for these request ids; ids without a constraint are ignored."""
        wanted = [
            (request_id, self._constraints[request_id], tuple(drafts))
            for request_id, drafts in draft_token_ids.items()
            if request_id in self._constraints
        ]
        if wanted:
            self._pending = self._masker.submit(
                lambda: {request_id: self._row_masks(constraint, drafts) for request_id, constraint, drafts in wanted}
            )

    def collect(self) -> dict[str, RowMasks]:
        """Wait for the masks of the last `begin`, by request id. A request whose masks failed ends at `accept`."""
        pending, self._pending = self._pending, None
        masks = {} if pending is None else pending.result()
        self._errors.update((request_id, rows.error) for request_id, rows in masks.items() if rows.error is not None)
        return masks

    def mask_rows(self, request_id: str, draft_token_ids: Sequence[int]) -> RowMasks:
        """The masks of one request at once, in the caller's thread; the matcher stays where it is."""
        constraint = self._constraints.get(request_id)
        return FREE if constraint is None else self._row_masks(constraint, draft_token_ids)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> Dsv4Error | None:
        """Advance a request's matcher by committed tokens. Returns: the error that ends the request, or None."""
        constraint = self._constraints.get(request_id)
        if constraint is None:
            return None
        if request_id in self._errors:
            return self._errors[request_id]
        try:
            matcher = constraint.matcher.result(COMPILE_LIMIT_S)
            for token_id in token_ids:
                matcher.accept(token_id)
        except Dsv4Error as err:
            return err
        return None

    def free(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._errors.pop(request_id, None)
        constraint = self._constraints.pop(request_id, None)
        if constraint is not None:
            constraint.matcher.cancel()

    def _new_matcher(self, request: GenerationRequest, generated_token_ids: tuple[int, ...]) -> Matcher:
        """Runs on a compile thread."""
        assert request.structured is not None
        grammar = self._grammars().get(request.structured)
        matcher = grammar.matcher(thinking=request.thinking, prompt_token_ids=request.prompt_token_ids)
        for token_id in generated_token_ids:
            matcher.accept(token_id)
        return matcher

    def _grammars(self) -> GrammarCache:
        with self._cache_lock:
            if self._cache is None:
                assert self._checkpoint_dir is not None
                vocabulary = GrammarVocabulary(
                    TextTokenizer.from_checkpoint(self._checkpoint_dir),
                    vocab_size=self._vocab_size,
                    eos_token_id=self._eos_token_id,
                )
                self._cache = GrammarCache(vocabulary)
            return self._cache

    def _row_masks(self, constraint: _Constraint, draft_token_ids: Sequence[int]) -> RowMasks:
        try:
            matcher = constraint.matcher.result(COMPILE_LIMIT_S)
            num_free, packed = walk_drafts(matcher, draft_token_ids, num_words=num_words(self._vocab_size))
        except TimeoutError:
            return RowMasks(error=InvalidRequestError(f"the grammar was not compiled within {COMPILE_LIMIT_S:.0f} s"))
        except Dsv4Error as err:
            return RowMasks(error=err)
        return RowMasks(None if packed is None else torch.from_numpy(packed).to(self._device), num_free)


def walk_drafts(matcher: Matcher, draft_token_ids: Sequence[int], *, num_words: int) -> tuple[int, PackedMask | None]:
    """Masks in front of the first draft and after each one that the grammar takes; the matcher is rolled back.

    Returns: how many rows are free, from the first one on; and [1 + number of drafts taken, num_words] int32, or None
    when all rows are free. Raises: InvalidRequestError when the grammar cannot be followed.
    """
    if not draft_token_ids and matcher.is_free:
        return 1, None
    rows = np.empty((1 + len(draft_token_ids), num_words), dtype=np.int32)
    num_taken, num_free = 0, 0
    try:
        for index in range(len(rows)):
            num_free += matcher.is_free
            matcher.mask(rows[index])
            if index == len(draft_token_ids) or not matcher.accepts(draft_token_ids[index]):
                break
            matcher.accept(draft_token_ids[index])
            num_taken += 1
    finally:
        matcher.rollback(num_taken)
    return num_free, None if num_free > num_taken else rows[: num_taken + 1]
