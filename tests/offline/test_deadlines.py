"""Priority and deadline of the offline API, on a real engine."""

import pytest

from dsv4_cluster import LLM, SamplingParams
from dsv4_cluster.clock import ManualClock
from dsv4_cluster.errors import DeadlineExceededError, InvalidRequestError

PROMPT = list(range(40, 240))


@pytest.fixture(scope="module")
def llm(toy_dir) -> LLM:
    return LLM(toy_dir, dtype="float32", num_pages=16, max_num_seqs=1)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | fields)


def test_a_lower_priority_number_is_answered_first(llm):
    finished = []
    for name, priority in [("usual", 0), ("late", 3), ("urgent", -2)]:
        for request in greedy(priority=priority).to_requests(name, PROMPT):
            llm.engine.add(request)

    while llm.engine.has_work():
        finished += [chunk.request_id for chunk in llm.engine.step().chunks if chunk.finish_reason]

    assert finished == ["urgent", "usual", "late"]


def test_answers_within_their_deadline_are_those_without_one(llm):
    free, bound = (llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(deadline_s=s))[0] for s in (None, 600))

    assert free.token_ids == bound.token_ids


def test_an_answer_that_is_not_complete_in_time_raises_and_leaves_nothing_behind(llm):
    with pytest.raises(DeadlineExceededError, match="of at most 3000 tokens"):
        llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(max_tokens=3000, deadline_s=0.2))

    llm.engine.check()
    assert not llm.engine.has_work()


def test_copies_that_start_later_have_the_deadline_of_the_call(toy_dir, monkeypatch):
    """The second copy starts behind the first one's prompt, and with one place it runs after it."""
    llm, clock = LLM(toy_dir, dtype="float32", num_pages=16, max_num_seqs=1, prefix_cache=False), ManualClock()
    monkeypatch.setattr(llm, "_clock", clock)
    monkeypatch.setattr(llm.engine, "_clock", clock)
    step = llm.engine.step

    def step_for_a_second():
        output = step()
        clock.advance(1.0)
        return output

    monkeypatch.setattr(llm.engine, "step", step_for_a_second)

    def ask(deadline_s: float | None) -> float:
        started_s = clock.now_s()
        llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(n=2, deadline_s=deadline_s))
        return clock.now_s() - started_s

    num_steps = ask(None)

    assert ask(num_steps) == num_steps
    with pytest.raises(DeadlineExceededError):
        ask(num_steps - 1)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_not_ahead_is_refused(llm, deadline_s):
    with pytest.raises(InvalidRequestError, match="deadline_s"):
        llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(deadline_s=deadline_s))
