"""The scheduler never deadlocks, never exceeds its budget, and accounts for every page under random load."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.config.kv_config import PAGE_TOKENS
from dsv4_cluster.engine.scheduler import Scheduler
from dsv4_cluster.engine.sequence import Sequence, SequenceStatus
from dsv4_cluster.engine.step import StepPlan
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams


class Harness:
    """Drives a scheduler with sequences whose tokens are made up; everything else is real."""

    def __init__(self, num_pages: int, max_num_seqs: int, budget: int) -> None:
        self.kv = KVManager(num_pages, max_num_seqs)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.scheduler = Scheduler(self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.sequences: dict[str, Sequence] = {}
        self.finished: list[str] = []

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int = 4, hold: bool = False) -> None:
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=(1,) * num_prompt_tokens,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        sequence = Sequence(request, [1] * num_prompt_tokens, hold_after_prefill=hold)
        self.sequences[name] = sequence
        self.scheduler.enqueue(sequence)

    def abort(self, name: str) -> None:
        if sequence := self.sequences.pop(name, None):
            self.scheduler.remove(sequence)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        for chunk in plan.scheduled:
            sequence = self.sequences[chunk.request_id]
            assert chunk.start == sequence.num_computed_tokens < chunk.end
            assert len(self.kv.page_ids(chunk.request_id)) * PAGE_TOKENS >= chunk.end
            sequence.num_computed_tokens = chunk.end
            if not chunk.samples:
                continue
            sequence.token_ids.append(2)
            if sequence.num_generated_tokens >= sequence.request.sampling.max_tokens:
                self.finished.append(chunk.request_id)
                self.abort(chunk.request_id)
            elif sequence.hold_after_prefill:
                self.scheduler.hold(sequence)
        self.kv.check()
        return plan

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("the scheduler did not finish")


arrivals = st.lists(
    st.tuples(st.integers(1, 3 * PAGE_TOKENS), st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(1, 5), st.sampled_from([1, 7, 64, 1000]), st.sampled_from([4, 6, 9]), st.data())
def test_every_request_finishes_whatever_arrives_and_leaves(arrivals, max_num_seqs, budget, num_pages, data):
    harness = Harness(num_pages, max_num_seqs, budget if len(arrivals) < 4 else max(budget, 64))
    aborted = set()
    capacity = num_pages * PAGE_TOKENS
    for i, (num_prompt_tokens, max_tokens, steps_before_next) in enumerate(arrivals):
        harness.add(f"r{i}", num_prompt_tokens, min(max_tokens, capacity - num_prompt_tokens))
        for _ in range(steps_before_next):
            harness.step()
        if data.draw(st.booleans()):
            victim = f"r{data.draw(st.integers(0, i))}"
            if victim in harness.sequences:
                aborted.add(victim)
            harness.abort(victim)

    harness.run(max_steps=20000)

    assert set(harness.finished) | aborted == {f"r{i}" for i in range(len(arrivals))}
    assert harness.kv.free_pages == num_pages


def test_running_answers_go_before_prompts():
    harness = Harness(num_pages=8, max_num_seqs=4, budget=10)
    harness.add("a", 5, max_tokens=50)
    harness.step()
    harness.add("b", 100)

    plan = harness.step()

    assert [(chunk.request_id, chunk.num_tokens) for chunk in plan.scheduled] == [("a", 1), ("b", 9)]


def test_a_prompt_is_cut_at_the_budget_and_samples_only_at_its_end():
    harness = Harness(num_pages=8, max_num_seqs=4, budget=4)
    harness.add("a", 10)

    plans = [harness.step() for _ in range(3)]

    assert [(c.start, c.end, c.samples) for plan in plans for c in plan.scheduled] == [
        (0, 4, False),
        (4, 8, False),
        (8, 10, True),
    ]


def test_the_youngest_is_preempted_when_pages_run_out_and_recomputed_first():
    harness = Harness(num_pages=2, max_num_seqs=2, budget=600)
    harness.add("old", PAGE_TOKENS - 1, max_tokens=10)
    harness.add("young", PAGE_TOKENS - 2, max_tokens=10)
    harness.step()
    harness.add("later", 5)

    plans = [harness.step() for _ in range(3)]

    assert [plan.preempted for plan in plans if plan.preempted] == [("young",)]
    assert harness.sequences["young"].status is SequenceStatus.WAITING
    assert harness.scheduler.waiting[0].request_id == "young"
    harness.run()
    assert harness.finished[0] == "old"


def test_a_held_sequence_is_not_scheduled_and_keeps_its_pages():
    harness = Harness(num_pages=2, max_num_seqs=2, budget=600)
    harness.add("held", 10, hold=True)
    harness.step()

    assert not harness.scheduler.has_work()
    assert harness.kv.free_pages == 1
    harness.abort("held")
    assert harness.kv.free_pages == 2
