"""Structured output inside the engine: grammars are compiled and masks computed on threads of their own.

Nobody waits for a grammar: a sequence whose grammar is being compiled is not sampled (`may_sample`). Masks are computed
between two steps and during the forward pass; a step waits for one at most `MASK_WAIT_S`, then goes on without that
sequence. One step: `prepare` and `mask_rows` serve its drafts, `begin` names the rows that will be sampled, the forward
pass runs, `collect` returns their masks, and after the commit `accept` advances the matchers. A matcher belongs to the
request, not to its pages, so preemption does not touch it. What goes wrong with one grammar ends its request only.

Nothing can end a native compile that takes too long: it holds its thread when its request is gone. While all compiling
threads are held so, requests that bring another grammar are refused at once; known grammars need no such thread.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from dsv4_cluster.clock import Clock
from dsv4_cluster.errors import Dsv4Error, InvalidRequestError, OverloadedError
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.structured.grammar import CompiledGrammar, GrammarCache
from dsv4_cluster.structured.matcher import Matcher
from dsv4_cluster.structured.vocabulary import GrammarVocabulary
from dsv4_cluster.structured.walk import DraftWalk
from dsv4_cluster.tokenizer.text import TextTokenizer

COMPILE_THREADS = 2
COMPILE_LIMIT_S = 10.0  # from the arrival of the request; usual grammars take milliseconds
MASK_WAIT_S = 0.01  # how long a step whose forward pass is through waits for masks; usual ones take microseconds
SLOW_MASK_S = 0.005  # a request whose last mask took longer waits for the next one outside the steps


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of one sequence in one step. Row 0 is for its next token, row i for the one after i drafts."""

    rows: tuple[torch.Tensor | None, ...] = ()  # [W] int32 each, see bitmask.py; which rows there are: DraftWalk
    error: Dsv4Error | None = None  # why row len(rows) could not be computed

    def row(self, index: int) -> torch.Tensor | None:
        """[W] int32 for one row, None where everything is allowed or no token can be accepted."""
        return self.rows[index] if index < len(self.rows) else None


FREE = RowMasks()


@dataclass(slots=True)
class _Constraint:
    """One constrained request. The threads that compute masks own `walk` and `taken`, one job after the other."""

    request: GenerationRequest
    matcher: Future[Matcher]
    compile_until_s: float
    taken: list[int]  # generated tokens that the matcher has accepted
    lane: ThreadPoolExecutor
    is_known: bool  # its grammar was compiled before, so that no compiling thread works for it
    walk: DraftWalk | None = None
    draft_token_ids: tuple[int, ...] = ()  # what the last job computes masks for
    job: Future[RowMasks] | None = None  # the last one; those before it are done when it is
    is_slow: bool = False


class Constraints:
    """All constrained requests of one engine. Its public methods belong to the engine's thread."""

    def __init__(
        self, checkpoint_dir: Path | None, *, vocab_size: int, eos_token_id: int, device: torch.device, clock: Clock
    ) -> None:
        """checkpoint_dir: where tokenizer.json is; it is read by `load_vocabulary` or for the first grammar."""
        self._checkpoint_dir = checkpoint_dir
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._device = device
        self._clock = clock
        self._cache: GrammarCache | None = None
        self._cache_lock = threading.Lock()
        self._constraints: dict[str, _Constraint] = {}
        self._left_behind: list[tuple[Future[Matcher], float]] = []  # compiling for nobody, and until when it may take
        self._begun: list[str] = []
        self._masks: dict[str, RowMasks] = {}  # of the running step
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar-compile")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._slow_masker = ThreadPoolExecutor(1, thread_name_prefix="grammar-slow-mask")

    def load_vocabulary(self) -> None:
        """Do ahead of time what the first grammar would wait for: 0.4 s for 129,280 token ids.

        Raises: CheckpointError when the tokenizer cannot serve grammars.
        """
        if self._checkpoint_dir is not None:
            self._grammars()

    def request_ids(self) -> set[str]:
        """The requests that have a constraint."""
        return set(self._constraints)

    def add(self, request: GenerationRequest, generated_token_ids: Sequence[int] = ()) -> None:
        """Start compiling for a request that has a constraint; others are ignored.

        generated_token_ids: what another engine generated already.
        Raises: InvalidRequestError; OverloadedError (503) while all threads are held by grammars that take too long.
        """
        if request.structured is None:
            return
        if request.stop.ignore_eos:
            raise InvalidRequestError("ignore_eos cannot be combined with a constrained answer, which EOS ends")
        if self._checkpoint_dir is None:
            raise InvalidRequestError("this model has no tokenizer, so its answers cannot be constrained")
        known = None if self._cache is None else self._cache.find(request.structured)
        if known is None and self._num_held_threads() >= COMPILE_THREADS:
            raise _no_thread(request.request_id)
        lane = self._compilers if known is None else self._masker
        self._constraints[request.request_id] = _Constraint(
            request,
            lane.submit(self._new_matcher, request, tuple(generated_token_ids), known),
            self._clock.now_s() + COMPILE_LIMIT_S,
            list(generated_token_ids),
            self._masker,
            known is not None,
        )

    def may_sample(self, request_id: str) -> bool:
        """False while the next token would have to wait: for the grammar, or for a mask that takes long."""
        constraint = self._constraints.get(request_id)
        if constraint is None:
            return True
        is_late = constraint.is_slow and constraint.job is not None and not constraint.job.done()
        return constraint.matcher.done() and not is_late

    def may_draft(self, request_id: str) -> bool:
        """False for a request whose masks take long: each draft needs one more."""
        constraint = self._constraints.get(request_id)
        return constraint is None or not constraint.is_slow

    def failures(self) -> dict[str, Dsv4Error]:
        """Requests to end, with the reason: a grammar that is not valid, takes too long or cannot be followed."""
        errors = {request_id: self._failure(constraint) for request_id, constraint in self._constraints.items()}
        return {request_id: error for request_id, error in errors.items() if error is not None}

    def wait(self, timeout_s: float) -> None:
        """Sleep until something more is ready, at most `timeout_s`; for an engine that has nothing else to do."""
        constraints = self._constraints.values()
        jobs: list[Future[object]] = [cast("Future[object]", one.job or one.matcher) for one in constraints]
        wait([job for job in jobs if not job.done()], timeout_s, FIRST_COMPLETED)

    def prepare(self, request_id: str, draft_token_ids: Sequence[int]) -> None:
        """Start computing, in the background, what `mask_rows` will be asked for."""
        constraint = self._constraints.get(request_id)
        if constraint is not None:
            self._compute(constraint, tuple(draft_token_ids))

    def mask_rows(self, request_id: str, draft_token_ids: Sequence[int]) -> RowMasks:
        """The masks of one request up to the token behind these drafts, or `FREE` when they come late."""
        constraint = self._constraints.get(request_id)
        if constraint is None:
            return FREE
        self._compute(constraint, tuple(draft_token_ids))
        return self._result(constraint, time.perf_counter() + MASK_WAIT_S) or FREE

    def begin(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Compute masks in the background for these request ids; ids without a constraint are ignored."""
        self._begun = [request_id for request_id in draft_token_ids if request_id in self._constraints]
        for request_id in self._begun:
            self._compute(self._constraints[request_id], tuple(draft_token_ids[request_id]))

    def collect(self) -> tuple[dict[str, RowMasks], frozenset[str]]:
        """Wait for the masks of the last `begin`. Returns: them by request id; the ids whose masks are not there yet.

        A late request is not to be sampled in this step.
        """
        limit_s = time.perf_counter() + MASK_WAIT_S
        results = {request_id: self._result(self._constraints[request_id], limit_s) for request_id in self._begun}
        self._masks = {request_id: masks for request_id, masks in results.items() if masks is not None}
        return self._masks, frozenset(results.keys() - self._masks.keys())

    def error_after(self, request_id: str, num_tokens: int) -> Dsv4Error | None:
        """Why the first `num_tokens` tokens of the running step cannot stand, None when they can."""
        masks = self._masks.get(request_id, FREE)
        return masks.error if num_tokens > len(masks.rows) else None

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Advance a request's matcher by committed tokens and compute the next mask, in the background."""
        constraint = self._constraints.get(request_id)
        if constraint is not None:
            self._submit(constraint, (), token_ids)

    def free(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored. What a thread is computing for it is dropped when it is done."""
        constraint = self._constraints.pop(request_id, None)
        if constraint is not None:
            is_left = not constraint.matcher.cancel() and not constraint.matcher.done()
            if is_left and not constraint.is_known:
                self._left_behind.append((constraint.matcher, constraint.compile_until_s))
            if constraint.job is not None:
                constraint.job.cancel()

    def _failure(self, constraint: _Constraint) -> Dsv4Error | None:
        if constraint.job is not None:
            if not constraint.job.done():
                return None
            masks = constraint.job.result()
            return None if masks.rows else masks.error
        if constraint.matcher.done():
            error = constraint.matcher.exception()
            return None if error is None else _typed(error)
        if self._clock.now_s() < constraint.compile_until_s:
            return None
        if not constraint.is_known and not constraint.matcher.running():
            return _no_thread(constraint.request.request_id)
        return InvalidRequestError(
            f"{constraint.request.request_id}: the grammar was not compiled within {COMPILE_LIMIT_S:.0f} s"
        )

    def _num_held_threads(self) -> int:
        """Compiling threads whose grammar takes too long and whose request is gone."""
        self._left_behind = [(job, until_s) for job, until_s in self._left_behind if not job.done()]
        return sum(self._clock.now_s() >= until_s for _, until_s in self._left_behind)

    def _result(self, constraint: _Constraint, limit_s: float) -> RowMasks | None:
        """What the last job found; None when it is not done by `limit_s` of the performance counter."""
        assert constraint.job is not None, constraint.request.request_id
        try:
            return constraint.job.result(max(0.0, limit_s - time.perf_counter()))
        except TimeoutError:
            constraint.is_slow = True
            return None

    def _compute(self, constraint: _Constraint, draft_token_ids: tuple[int, ...]) -> None:
        """Unless the last job is the one that is wanted."""
        if constraint.job is None or constraint.draft_token_ids != draft_token_ids:
            self._submit(constraint, draft_token_ids, ())

    def _submit(self, constraint: _Constraint, draft_token_ids: tuple[int, ...], accepted: Sequence[int]) -> None:
        if constraint.job is None or constraint.job.done():  # otherwise the next job must queue up behind it
            constraint.lane = self._slow_masker if constraint.is_slow else self._masker
        constraint.draft_token_ids = draft_token_ids
        constraint.job = constraint.lane.submit(self._run, constraint, draft_token_ids, tuple(accepted))

    def _run(self, constraint: _Constraint, draft_token_ids: Sequence[int], accepted: tuple[int, ...]) -> RowMasks:
        """One job, on a masking thread; the grammar is compiled. It never raises."""
        started = time.perf_counter()
        try:
            if accepted:
                self._advance(constraint, accepted)
            if constraint.walk is None:
                constraint.walk = DraftWalk(constraint.matcher.result(), self._vocab_size)
            masks = constraint.walk.rows(draft_token_ids)
        except Exception as err:
            # Boundary of the thread: whatever this grammar raised ends its request, and no other.
            return RowMasks(error=_typed(err))
        constraint.is_slow = time.perf_counter() - started > SLOW_MASK_S
        rows = tuple(None if mask is None else torch.from_numpy(mask).to(self._device) for mask in masks)
        return RowMasks(rows, constraint.walk.error)

    def _advance(self, constraint: _Constraint, accepted: tuple[int, ...]) -> None:
        """A matcher that was lost along drafts that do not stand is made anew, because plain decoding still has it."""
        walk, constraint.walk = constraint.walk, None
        constraint.taken += accepted
        if walk is not None and walk.error is not None:
            remade: Future[Matcher] = Future()
            remade.set_result(self._new_matcher(constraint.request, tuple(constraint.taken)))
            constraint.matcher = remade
            return
        if walk is not None:
            walk.end()
        matcher = constraint.matcher.result()
        for token_id in accepted:
            matcher.accept(token_id)

    def _new_matcher(
        self, request: GenerationRequest, generated_token_ids: tuple[int, ...], known: CompiledGrammar | None = None
    ) -> Matcher:
        """CPU-bound; runs on the compiling and masking threads. known: the compiled grammar, None = to be compiled."""
        assert request.structured is not None
        grammar = known or self._grammars().get(request.structured)
        matcher = Matcher.of_answer(grammar, thinking=request.thinking, prompt_token_ids=request.prompt_token_ids)
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


def _no_thread(request_id: str) -> OverloadedError:
    return OverloadedError(
        f"{request_id}: all {COMPILE_THREADS} threads compile grammars that take more than {COMPILE_LIMIT_S:.0f} s; "
        "a new grammar has to wait until one is done",
        http_status=503,
    )


def _typed(error: BaseException) -> Dsv4Error:
    """The error of a thread as one of ours."""
    if isinstance(error, Dsv4Error):
        return error
    return Dsv4Error(f"the grammar failed: {type(error).__name__}: {error}")
