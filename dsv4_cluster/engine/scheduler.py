"""Which tokens the next step computes: running answers first, then prompts in chunks, then new sequences.

Within each group urgency decides: a lower priority number first, then the older sequence; new sequences are taken from
the least served tenant (`fairness.py`). Pages are taken as sequences grow; when none is left the least urgent running
sequence gives its pages back and waits again, before all others of its priority. A waiting sequence may also send away
running ones of a higher priority number, never its equals. The most urgent sequence therefore always advances, and
since `add` refuses a request that could not fit alone, the engine never deadlocks.

A sequence that may not be sampled yet (its grammar is being compiled) advances up to its last token and no further; it
delays nobody else.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from dsv4_cluster.engine.fairness import TenantShares, WaitingQueue, urgency
from dsv4_cluster.engine.residency import Residency
from dsv4_cluster.engine.sequence import Sequence, SequenceStatus
from dsv4_cluster.engine.step import ScheduledChunk, StepPlan

DraftLimits = Callable[[Seq[Sequence], int], dict[str, int]]  # (decoding sequences, tokens to spare) -> drafts by id
MaySample = Callable[[str], bool]  # of a request id: whether its next token could be chosen now


def no_drafts(sequences: Seq[Sequence], budget: int) -> dict[str, int]:  # noqa: ARG001
    """Plain decoding."""
    return {}


def always(request_id: str) -> bool:  # noqa: ARG001
    """Nothing to wait for."""
    return True


class Scheduler:
    """Owns the queues; `Residency` owns pages and slots."""

    def __init__(
        self,
        residency: Residency,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        draft_limits: DraftLimits = no_drafts,
        may_sample: MaySample = always,
    ) -> None:
        self._residency = residency
        self._draft_limits = draft_limits
        self._may_sample = may_sample
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._shares = TenantShares()
        self._with_deadline: dict[str, Sequence] = {}
        self._step_id = 0
        self._num_admitted = 0
        self.waiting = WaitingQueue(self._shares)
        self.running: list[Sequence] = []  # in the order in which they started last
        self.held: dict[str, Sequence] = {}
        self.num_preemptions = 0

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new sequence at the end of the queue."""
        self._residency.observe(sequence)
        self._enter(sequence)
        self.waiting.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """Make a new sequence running whose pages are already allocated (an import)."""
        self._enter(sequence)
        self._run(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take a running sequence out of scheduling and keep its pages."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.HELD
        self.held[sequence.request_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in any phase and free what it owns."""
        self._shares.leave(sequence.request.tenant)
        self._with_deadline.pop(sequence.request_id, None)
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self._residency.forget(sequence)
            return
        if sequence.status is SequenceStatus.HELD:
            del self.held[sequence.request_id]
        else:
            self.running.remove(sequence)
        self._residency.free(sequence)

    def expired(self, now_s: float) -> list[Sequence]:
        """Sequences whose deadline has passed; a held one has its token already and is left to who asked for it."""
        return [
            sequence
            for sequence in self._with_deadline.values()
            if sequence.status is not SequenceStatus.HELD and (sequence.expires_at_s or 0.0) <= now_s
        ]

    def has_work(self) -> bool:
        """True when a step could make progress, now or once pages are free."""
        return bool(self.running or self.waiting)

    def plan(self) -> StepPlan:
        """Choose the chunks of the next step and reserve their pages."""
        budget = self._max_num_batched_tokens
        scheduled: list[ScheduledChunk] = []
        preempted: list[str] = []
        num_drafts = self._num_drafts(budget)
        for sequence in self._by_urgency():
            num_tokens = self._num_tokens(sequence, budget)
            if num_tokens == 0 or sequence.status is not SequenceStatus.RUNNING:
                continue  # out of budget, not to be sampled yet, or preempted a moment ago
            if not self._reserve(sequence, num_tokens, scheduled, preempted):
                continue
            wanted = min(num_drafts.get(sequence.request_id, 0), budget - num_tokens)
            drafts = self._reserve_drafts(sequence, wanted)
            self._take(sequence, num_tokens, scheduled, drafts)
            budget -= num_tokens + drafts
        if not preempted and self.waiting:
            self._admit(budget, scheduled, preempted)
        self._step_id += 1
        return StepPlan(self._step_id, tuple(scheduled), tuple(preempted))

    def _enter(self, sequence: Sequence) -> None:
        self._shares.enter(sequence.request.tenant)
        if sequence.expires_at_s is not None:
            self._with_deadline[sequence.request_id] = sequence

    def _run(self, sequence: Sequence) -> None:
        if sequence.admission_id == 0:
            self._num_admitted += 1
            sequence.admission_id = self._num_admitted
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def _by_urgency(self) -> list[Sequence]:
        """Answers before prompts, then by priority and age."""
        return sorted(self.running, key=lambda sequence: (sequence.num_uncomputed_tokens > 1, *urgency(sequence)))

    def _reserve(
        self, sequence: Sequence, num_tokens: int, scheduled: list[ScheduledChunk], preempted: list[str]
    ) -> bool:
        """Get pages for the chunk, preempting less urgent sequences that are not in this step yet, at last itself."""
        in_step = {chunk.request_id for chunk in scheduled}
        while not self._residency.extend(sequence, sequence.num_computed_tokens + num_tokens):
            victim = max((s for s in self.running if s.request_id not in in_step), key=urgency)
            self._preempt(victim)
            preempted.append(victim.request_id)
            if victim is sequence:
                return False
        return True

    def _num_drafts(self, budget: int) -> dict[str, int]:
        """Drafts by request id. Every answer gets its one token first; of the rest, prompts are left at least half."""
        decoding = [s for s in self.running if s.is_decoding and self._may_sample(s.request_id)]
        spare = max(0, budget - len(decoding))
        has_prompts = bool(self.waiting) or len(decoding) < len(self.running)
        return self._draft_limits(decoding, spare // 2 if has_prompts else spare)

    def _reserve_drafts(self, sequence: Sequence, num_drafts: int) -> int:
        """Get pages for drafts if they are free; drafts never take a page from another sequence."""
        while num_drafts and not self._residency.extend(sequence, len(sequence.token_ids) + num_drafts):
            num_drafts -= 1
        return num_drafts

    def _preempt(self, sequence: Sequence) -> None:
        """Free the pages and queue the sequence before all others; what no tier kept is computed again."""
        self.running.remove(sequence)
        self._residency.preempt(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.append(sequence, is_first=True)
        self.num_preemptions += 1

    def _admit(self, budget: int, scheduled: list[ScheduledChunk], preempted: list[str]) -> None:
        """Start waiting sequences while budget, slots and pages for their whole text so far last.

        One whose prefix a running prompt is computing right now is passed over: it resumes from there a little later.
        """
        for sequence in self.waiting.by_turn():
            if budget <= 0 or preempted:
                return
            if self._residency.is_coming(sequence, self._advancing(sequence.request.priority)):
                continue
            if not self._start_waiting(sequence):
                budget += self._send_away(sequence, scheduled, preempted)
                if not preempted or not self._start_waiting(sequence):
                    return
            num_tokens = self._num_tokens(sequence, budget)
            if num_tokens:
                self._take(sequence, num_tokens, scheduled)
                budget -= num_tokens

    def _advancing(self, priority: int) -> list[Sequence]:
        """Running sequences, not less urgent than `priority`, that will get somewhere by themselves."""
        return [
            sequence
            for sequence in self.running
            if sequence.request.priority <= priority
            and (sequence.num_uncomputed_tokens > 1 or self._may_sample(sequence.request_id))
        ]

    def _start_waiting(self, sequence: Sequence) -> bool:
        if len(self.running) >= self._max_num_seqs or not self._residency.admit(sequence):
            return False
        self.waiting.remove(sequence)
        self._run(sequence)
        return True

    def _send_away(self, sequence: Sequence, scheduled: list[ScheduledChunk], preempted: list[str]) -> int:
        """Preempt running sequences of higher priority numbers, least urgent first, until `sequence` fits.

        Nobody is sent away in vain: unless all of them together make enough room, nothing happens.
        Returns: tokens of this step that they leave to others.
        """
        victims = sorted((s for s in self.running if s.request.priority > sequence.request.priority), key=urgency)
        if not victims or not self._residency.fits_without(sequence, victims):
            return 0
        num_tokens = 0
        while not self._residency.fits_without(sequence, ()) or len(self.running) >= self._max_num_seqs:
            victim = victims.pop()
            self._preempt(victim)
            preempted.append(victim.request_id)
            for chunk in [chunk for chunk in scheduled if chunk.request_id == victim.request_id]:
                scheduled.remove(chunk)
                self._shares.serve(victim.request.tenant, -chunk.num_tokens)
                num_tokens += chunk.num_tokens
        return num_tokens

    def _take(self, sequence: Sequence, num_tokens: int, scheduled: list[ScheduledChunk], num_drafts: int = 0) -> None:
        scheduled.append(_chunk(sequence, num_tokens, num_drafts))
        self._shares.serve(sequence.request.tenant, num_tokens + num_drafts)

    def _num_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens of its next chunk: what is left, within the budget, cut where the prefix cache keeps a boundary.

        The last token is left alone while what it leads to could not be chosen.
        """
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        if num_tokens == sequence.num_uncomputed_tokens and not self._may_sample(sequence.request_id):
            num_tokens -= 1
        if num_tokens <= 1:
            return num_tokens
        return self._residency.cut(sequence, sequence.num_computed_tokens + num_tokens) - sequence.num_computed_tokens


def _chunk(sequence: Sequence, num_tokens: int, num_drafts: int = 0) -> ScheduledChunk:
    start = sequence.num_computed_tokens
    end = start + num_tokens
    return ScheduledChunk(
        sequence.request_id, start, end, samples=end == len(sequence.token_ids), num_drafts=num_drafts
    )
