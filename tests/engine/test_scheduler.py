"""The scheduler never deadlocks, never exceeds its budget, and accounts for every page under random load."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.config.kv_config import PAGE_TOKENS
from dsv4_cluster.engine.sequence import SequenceStatus
from tests.kit.scheduler_harness import SchedulerHarness

arrivals = st.lists(
    # family (prompts of one family begin alike), tokens of that beginning, tokens of its own, answer,
    # steps before the next one arrives, priority, tenant, steps before its first token may be chosen
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 640),
        st.integers(1, PAGE_TOKENS),
        st.integers(1, 300),
        st.integers(0, 40),
        st.integers(-1, 1),
        st.sampled_from("abc"),
        st.sampled_from([0, 0, 1, 30]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals,
    st.integers(1, 5),
    st.sampled_from([1, 7, 64, 1000]),
    st.sampled_from([4, 6, 9]),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([(0, 0), (400_000, 0), (0, 600_000), (300_000, 10**8)]),  # host memory and disk, bytes
    st.data(),
)
def test_every_request_finishes_whatever_arrives_and_leaves(
    arrivals, max_num_seqs, budget, num_pages, num_snapshots, tier, data
):
    budget = budget if len(arrivals) < 4 else max(budget, 64)
    harness = SchedulerHarness(
        num_pages,
        max_num_seqs,
        budget,
        num_snapshots=num_snapshots,
        host_memory_bytes=tier[0],
        host_disk_bytes=tier[1],
    )
    aborted = set()
    capacity = num_pages * PAGE_TOKENS
    for i, (family, num_common, num_own, max_tokens, steps_before_next, priority, tenant, wait) in enumerate(arrivals):
        prompt = [*([family] * num_common), *([10 + i] * num_own)]
        harness.num_waiting_steps[f"r{i}"] = wait
        harness.add(f"r{i}", prompt, min(max_tokens, capacity - len(prompt)), priority=priority, tenant=tenant)
        for _ in range(steps_before_next):
            harness.step()
        if data.draw(st.booleans()):
            victim = f"r{data.draw(st.integers(0, i))}"
            if victim in harness.sequences:
                aborted.add(victim)
            harness.abort(victim)

    harness.run(max_steps=20000)

    assert set(harness.finished) | aborted == {f"r{i}" for i in range(len(arrivals))}
    assert harness.residency.available_pages == num_pages
    assert harness.kv.free_slots == max_num_seqs


def test_running_answers_go_before_prompts():
    harness = SchedulerHarness(num_pages=8, max_num_seqs=4, budget=10)
    harness.add("a", 5, max_tokens=50)
    harness.step()
    harness.add("b", 100)

    plan = harness.step()

    assert [(chunk.request_id, chunk.num_tokens) for chunk in plan.scheduled] == [("a", 1), ("b", 9)]


def test_a_prompt_is_cut_at_the_budget_and_samples_only_at_its_end():
    harness = SchedulerHarness(num_pages=8, max_num_seqs=4, budget=4)
    harness.add("a", 10)

    plans = [harness.step() for _ in range(3)]

    assert [(c.start, c.end, c.samples) for plan in plans for c in plan.scheduled] == [
        (0, 4, False),
        (4, 8, False),
        (8, 10, True),
    ]


def test_the_youngest_is_preempted_when_pages_run_out_and_recomputed_first():
    harness = SchedulerHarness(num_pages=2, max_num_seqs=2, budget=600, prefix_cache=False)
    harness.add("old", PAGE_TOKENS - 1, max_tokens=10)
    harness.add("young", PAGE_TOKENS - 2, max_tokens=10)
    harness.step()
    harness.add("later", 5)

    plans = [harness.step() for _ in range(3)]

    assert [plan.preempted for plan in plans if plan.preempted] == [("young",)]
    assert harness.sequences["young"].status is SequenceStatus.WAITING
    assert next(harness.scheduler.waiting.by_turn()).request_id == "young"
    harness.run()
    assert harness.finished[0] == "old"


def test_a_held_sequence_is_not_scheduled_and_keeps_its_pages():
    harness = SchedulerHarness(num_pages=2, max_num_seqs=2, budget=600)
    harness.add("held", 10, hold=True)
    harness.step()

    assert not harness.scheduler.has_work()
    assert harness.residency.available_pages == 1
    harness.abort("held")
    assert harness.residency.available_pages == 2


def test_a_lower_priority_number_is_admitted_first():
    harness = SchedulerHarness(num_pages=8, max_num_seqs=1, budget=64)
    harness.add("running", 10, max_tokens=3)
    harness.step()
    for name, priority in [("late", 5), ("usual", 0), ("urgent", -1), ("usual too", 0)]:
        harness.add(name, 10, max_tokens=1, priority=priority)

    harness.run()

    assert harness.finished == ["urgent", "running", "usual", "usual too", "late"]


def test_an_urgent_request_sends_away_only_less_urgent_ones_and_only_as_many_as_it_needs():
    harness = SchedulerHarness(num_pages=4, max_num_seqs=4, budget=2000)
    for name, priority in [("equal", 0), ("low", 1), ("lowest", 2)]:
        harness.add(name, 200, max_tokens=40, priority=priority)
    harness.step()
    harness.step()
    harness.add("urgent", [2] * 400, max_tokens=2)

    plan = harness.step()

    assert plan.preempted == ("lowest",)
    assert {chunk.request_id for chunk in plan.scheduled} == {"equal", "low", "urgent"}
    harness.run()
    assert set(harness.finished) == {"equal", "low", "lowest", "urgent"}


def test_nobody_is_sent_away_for_a_request_that_would_not_fit_anyway():
    harness = SchedulerHarness(num_pages=4, max_num_seqs=4, budget=2000)
    harness.add("equal", 500, max_tokens=10)
    harness.add("low", [2] * 200, max_tokens=60, priority=1)
    harness.step()
    harness.step()
    harness.add("urgent", [3] * 700, max_tokens=2)

    plan = harness.step()

    assert plan.preempted == ()
    harness.run()
    assert harness.scheduler.num_preemptions <= 1


def test_tenants_take_turns_however_many_requests_one_of_them_has():
    harness = SchedulerHarness(num_pages=16, max_num_seqs=1, budget=64)
    for i in range(8):
        harness.add(f"many{i}", [i] * 20, max_tokens=2, tenant="many")
    harness.step()
    harness.add("few0", [90] * 20, max_tokens=2, tenant="few")
    harness.add("few1", [91] * 20, max_tokens=2, tenant="few")

    harness.run()

    assert harness.finished[:4] == ["many0", "few0", "many1", "few1"]


def test_a_tenant_that_was_idle_has_no_credit():
    harness = SchedulerHarness(num_pages=16, max_num_seqs=1, budget=64)
    harness.add("early", [1] * 20, max_tokens=2, tenant="returning")
    harness.run()
    for i in range(6):
        harness.add(f"busy{i}", [10 + i] * 40, max_tokens=2, tenant="busy")
    for _ in range(5):
        harness.step()
    for i in range(4):
        harness.add(f"back{i}", [50 + i] * 40, max_tokens=2, tenant="returning")

    harness.run()

    order = harness.finished[harness.finished.index("back0") :]
    assert [name.rstrip("0123456789") for name in order[:6]] == ["back", "busy"] * 3
