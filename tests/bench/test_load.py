"""Closed and open loops against a real server: who is sent, when, and what later turns repeat."""

import asyncio
import dataclasses
from itertools import pairwise

import pytest

from dsv4_cluster.bench.load import LoadSpec, arrival_times, run_load
from dsv4_cluster.bench.workload import WorkloadSpec, make_workload
from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.errors import OverloadedError
from tests.kit.codec import chunks_of, load_codec, tokens_of
from tests.kit.scripted_service import says

FIXED = WorkloadSpec(kind="fixed", num_requests=12, input_tokens=5, output_tokens=7)
TURNS = WorkloadSpec(kind="multi-turn", num_requests=6, num_turns=3, input_tokens=4, prefix_tokens=6)


class InFlight:
    """Largest number of requests between their two callbacks."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def start(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def done(self, _) -> None:
        self.now -= 1


def _run(endpoint, spec, load, watch=None):
    watch = watch or InFlight()
    workload = make_workload(spec)
    return asyncio.run(run_load(endpoint, workload, load, MonotonicClock(), on_start=watch.start, on_record=watch.done))


def _slow(seconds):
    return lambda _: [seconds, *chunks_of(tokens_of("Hello"))]


def test_a_closed_loop_keeps_its_number_of_users(endpoint, service):
    service.script = _slow(0.05)
    watch = InFlight()

    result = _run(endpoint, FIXED, LoadSpec(concurrency=3), watch)

    assert len(result.records) == 12 and all(record.is_ok for record in result.records)
    assert (watch.most, watch.now) == (3, 0)
    assert result.duration_s >= 4 * 0.05


def test_an_open_loop_sends_at_its_times_whatever_the_server_does(endpoint, service):
    service.script = _slow(0.6)
    load = LoadSpec(rate=40.0, seed=5)

    result = _run(endpoint, FIXED, load)

    assert [r.due_s for r in result.records] == pytest.approx(arrival_times(12, 40.0, 1.0, 5))
    assert all(record.sent_s >= record.due_s for record in result.records)
    assert result.records[-1].due_s < 0.6, "all of them left before the first answer could be there"
    assert len(service.requests) == 12


def test_a_rate_counts_turns(endpoint, service):
    result = _run(endpoint, TURNS, LoadSpec(rate=60.0, seed=5))

    first_turns = [record.due_s for record in result.records if record.turn == 0]
    assert first_turns == pytest.approx(arrival_times(2, 60.0 / 3, 1.0, 5))


def test_nothing_starts_after_the_duration(endpoint, service):
    service.script = _slow(0.2)

    result = _run(endpoint, FIXED, LoadSpec(concurrency=2, duration_s=0.3))

    assert 2 <= len(result.records) < 12
    assert all(record.is_ok and record.sent_s < 0.3 for record in result.records)


def test_an_open_loop_ends_with_its_duration(endpoint, service):
    result = _run(endpoint, FIXED, LoadSpec(rate=2.0, duration_s=0.5, seed=5))

    assert len(result.records) == sum(due_s < 0.5 for due_s in arrival_times(12, 2.0, 1.0, 5))


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_later_turn_repeats_the_conversation(endpoint, service, api):
    service.script = says(" blue")
    endpoint = dataclasses.replace(endpoint, api=api)

    _run(endpoint, dataclasses.replace(TURNS, num_requests=3), LoadSpec(concurrency=1))

    conversation = make_workload(TURNS)[0]
    prompts = [load_codec().text.decode(request.prompt_token_ids) for request in service.requests]
    said = [conversation.prefix, conversation.turns[0].text, " blue", conversation.turns[1].text, " blue"]
    places = [prompts[2].index(part) for part in said[:2]]
    assert places == sorted(places)
    assert prompts[2].count(" blue") == 2
    if api == "completions":
        assert prompts[2].endswith("".join(said) + conversation.turns[2].text)
        assert all(later.startswith(earlier + " blue") for earlier, later in pairwise(prompts))


def test_a_request_carries_the_turns_limit_and_seed(endpoint, service):
    endpoint = dataclasses.replace(endpoint, extra_body={"top_p": 0.5})

    _run(endpoint, FIXED, LoadSpec(concurrency=1, temperature=0.3))

    turn, request = make_workload(FIXED)[0].turns[0], service.requests[0]
    assert len(request.prompt_token_ids) == 1 + turn.num_input_tokens  # BOS in front
    assert request.sampling.max_tokens == 7
    assert request.sampling.seed == turn.seed
    assert (request.sampling.temperature, request.sampling.top_p) == (0.3, 0.5)


def test_a_failed_turn_ends_its_conversation_and_no_other(endpoint, service):
    answers = iter([[OverloadedError("full")]])
    service.script = lambda _: next(answers, None) or chunks_of(tokens_of("Hi"))

    result = _run(endpoint, TURNS, LoadSpec(concurrency=1))

    assert [(r.conversation, r.turn, r.is_ok) for r in result.records] == [
        (0, 0, False),
        (1, 0, True),
        (1, 1, True),
        (1, 2, True),
    ]


def test_more_than_the_server_takes_is_refused_and_counted(endpoint, service, max_in_flight):
    service.script = _slow(0.5)
    spec = dataclasses.replace(FIXED, num_requests=max_in_flight + 6)

    result = _run(endpoint, spec, LoadSpec(rate=400.0, burstiness=100.0))

    assert sum(record.is_ok for record in result.records) == max_in_flight
    assert {record.error_kind for record in result.records if not record.is_ok} == {"http 429"}


def test_a_cancelled_run_leaves_no_request_behind(endpoint, service):
    service.script = _slow(30.0)

    async def cancelled() -> None:
        watch = InFlight()
        load = LoadSpec(concurrency=4)
        work = run_load(
            endpoint, make_workload(FIXED), load, MonotonicClock(), on_start=watch.start, on_record=watch.done
        )
        task = asyncio.create_task(work)
        await asyncio.to_thread(service.wait_until_started, 4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())

    service.wait_until_over(4)
    assert service.num_aborted == 4
