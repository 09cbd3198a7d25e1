"""Drives a scheduler with sequences whose tokens are made up; queues, cache accounting and pools are real."""

import torch

from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.engine.residency import Residency
from dsv4_cluster.engine.scheduler import Scheduler
from dsv4_cluster.engine.sequence import Sequence, SequenceStatus
from dsv4_cluster.engine.step import StepPlan
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams
from dsv4_cluster.tools.presets import preset_config

FIRST_OWN_TOKEN = 1000  # generated tokens differ from all prompt tokens


def make_residency(kv: KVConfig, max_num_seqs: int) -> tuple[KVManager, Residency]:
    """The allocation side of an engine on pools of the toy model."""
    layout = KVLayout.build(preset_config("toy"), kv, torch.bfloat16, fingerprint="weights")
    pools = KVPools.allocate(layout, kv.num_pages, max_num_seqs, "cpu")
    manager = KVManager(kv.num_pages, max_num_seqs)
    return manager, Residency(manager, pools, kv, max_num_seqs=max_num_seqs)


class SchedulerHarness:
    """A scheduler whose chunks count as computed at once; every invariant is checked after every step."""

    def __init__(self, num_pages: int, max_num_seqs: int, budget: int, **kv_fields) -> None:
        self.kv, self.residency = make_residency(KVConfig(num_pages=num_pages, **kv_fields), max_num_seqs)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.scheduler = Scheduler(
            self.residency,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            may_sample=lambda request_id: self.num_waiting_steps.get(request_id, 0) <= 0,
        )
        self.num_waiting_steps: dict[str, int] = {}  # by request id: steps until its next token may be chosen
        self.sequences: dict[str, Sequence] = {}
        self.finished: list[str] = []

    def add(self, name: str, prompt: list[int] | int, max_tokens: int = 4, hold: bool = False, **fields) -> None:
        prompt = [1] * prompt if isinstance(prompt, int) else prompt
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            **fields,
        )
        sequence = Sequence(request, list(prompt), hold_after_prefill=hold)
        self.sequences[name] = sequence
        self.scheduler.enqueue(sequence)

    def abort(self, name: str) -> None:
        if sequence := self.sequences.pop(name, None):
            self.scheduler.remove(sequence)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        is_waiting = any(self.num_waiting_steps.get(name, 0) > 0 for name in self.sequences)
        assert plan.scheduled or is_waiting or not self.scheduler.has_work(), "work is left, yet nothing is computed"
        assert not any(
            chunk.samples and self.num_waiting_steps.get(chunk.request_id, 0) > 0 for chunk in plan.scheduled
        )
        self.num_waiting_steps = {name: left - 1 for name, left in self.num_waiting_steps.items()}
        for chunk in plan.scheduled:
            self._compute(self.sequences[chunk.request_id], chunk.start, chunk.end, chunk.samples)
        self.residency.check()
        owners = {s.request_id for s in self.sequences.values() if s.status is not SequenceStatus.WAITING}
        assert self.kv.seq_ids() == owners
        return plan

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the scheduler did not finish")

    def _compute(self, sequence: Sequence, start: int, end: int, samples: bool) -> None:
        assert start == sequence.num_computed_tokens < end
        assert len(self.kv.page_ids(sequence.request_id)) * PAGE_TOKENS >= end
        sequence.num_computed_tokens = end
        self.residency.commit(sequence, start)
        if not samples:
            return
        sequence.token_ids.append(FIRST_OWN_TOKEN + len(sequence.token_ids))
        if sequence.num_generated_tokens >= sequence.request.sampling.max_tokens:
            self.finished.append(sequence.request_id)
            self.abort(sequence.request_id)
        elif sequence.hold_after_prefill:
            self.scheduler.hold(sequence)
