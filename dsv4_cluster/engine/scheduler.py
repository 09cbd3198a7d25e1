"""Which tokens the next step computes: running answers first, then prompts in chunks, then new sequences.

First come, first served. Pages are taken as sequences grow; when none is left the youngest running sequence gives its
pages back and is computed again later. The oldest one therefore always advances, and since `add` refuses a request
that could not fit alone, the engine never deadlocks.
"""

from collections import deque

from dsv4_cluster.engine.residency import Residency
from dsv4_cluster.engine.sequence import Sequence, SequenceStatus
from dsv4_cluster.engine.step import ScheduledChunk, StepPlan


class Scheduler:
    """Owns the queues; `Residency` owns pages and slots."""

    def __init__(self, residency: Residency, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._residency = residency
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._step_id = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.held: dict[str, Sequence] = {}
        self.num_preemptions = 0

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new sequence at the end of the queue."""
        self._residency.observe(sequence)
        self.waiting.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """Make a sequence running whose pages are already allocated (an import)."""
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take a running sequence out of scheduling and keep its pages."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.HELD
        self.held[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any phase and free what it owns."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            return
        if sequence.status is SequenceStatus.HELD:
            del self.held[sequence.request_id]
        else:
            self.running.remove(sequence)
        self._residency.free(sequence)

    def has_work(self) -> bool:
        """True when a step could make progress, now or once pages are free."""
        return bool(self.running or self.waiting)

    def plan(self) -> StepPlan:
        """Choose the chunks of the next step and reserve their pages."""
        budget = self._max_num_batched_tokens
        scheduled: list[ScheduledChunk] = []
        preempted: list[str] = []
        for sequence in self._by_urgency():
            num_tokens = self._num_tokens(sequence, budget)
            if num_tokens == 0 or sequence.status is not SequenceStatus.RUNNING:
                continue  # out of budget, or preempted a moment ago
            if not self._reserve(sequence, num_tokens, scheduled, preempted):
                continue
            scheduled.append(_chunk(sequence, num_tokens))
            budget -= num_tokens
        if not preempted:
            self._admit(budget, scheduled)
        self._step_id += 1
        return StepPlan(self._step_id, tuple(scheduled), tuple(preempted))

    def _by_urgency(self) -> list[Sequence]:
        """Answers before prompts, older before younger."""
        return sorted(self.running, key=lambda sequence: sequence.num_uncomputed_tokens > 1)

    def _reserve(
        self, sequence: Sequence, num_tokens: int, scheduled: list[ScheduledChunk], preempted: list[str]
    ) -> bool:
        """Get pages for the chunk, preempting younger sequences that are not in this step yet, at last itself."""
        in_step = {chunk.request_id for chunk in scheduled}
        while not self._residency.extend(sequence, sequence.num_computed_tokens + num_tokens):
            victim = next(s for s in reversed(self.running) if s.request_id not in in_step)
            self._preempt(victim)
            preempted.append(victim.request_id)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the pages and queue the sequence before all others; its tokens are computed again."""
        self.running.remove(sequence)
        self._residency.free(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, budget: int, scheduled: list[ScheduledChunk]) -> None:
        """Start waiting sequences while budget, slots and pages for their whole text so far last.

        One whose prefix a running prompt is computing right now is passed over: it resumes from there a little later.
        """
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) >= self._max_num_seqs:
                return
            if self._residency.is_coming(sequence, self.running):
                continue
            if not self._residency.admit(sequence):
                return
            self.waiting.remove(sequence)
            self.start(sequence)
            num_tokens = self._num_tokens(sequence, budget)
            scheduled.append(_chunk(sequence, num_tokens))
            budget -= num_tokens

    def _num_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens of its next chunk: what is left, within the budget, cut where the prefix cache keeps a boundary."""
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        if num_tokens <= 1:
            return num_tokens
        return self._residency.cut(sequence, sequence.num_computed_tokens + num_tokens) - sequence.num_computed_tokens


def _chunk(sequence: Sequence, num_tokens: int) -> ScheduledChunk:
    start = sequence.num_computed_tokens
    end = start + num_tokens
    return ScheduledChunk(sequence.request_id, start, end, samples=end == len(sequence.token_ids))
