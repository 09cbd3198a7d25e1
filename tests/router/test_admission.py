"""The bound on requests in flight, and the choice of a replica."""

import asyncio
import random

import pytest

from dsv4_cluster.errors import OverloadedError
from dsv4_cluster.router.admission import Admission
from dsv4_cluster.router.policy import least_loaded
from tests.kit.scripted_replicas import HANG, ScriptedDecode, ScriptedPrefill, request
from tests.kit.snapshots import snapshot

IDLE = snapshot("a")


def test_the_bound_holds_and_a_place_comes_back_after_an_error():
    admission = Admission(max_in_flight=1, max_model_len=10)

    with pytest.raises(ValueError), admission.slot():
        with pytest.raises(OverloadedError) as caught, admission.slot():
            pass
        raise ValueError

    assert caught.value.http_status == 429
    assert admission.num_in_flight == 0


def test_requests_over_the_bound_are_refused_while_others_run(make_orchestrator):
    async def story():
        prefill = ScriptedPrefill([HANG])
        orchestrator = make_orchestrator(prefill, ScriptedDecode(), max_ongoing_requests=1)
        running = asyncio.create_task(anext(orchestrator.generate(request())))
        await asyncio.wait_for(prefill.called.wait(), 5)

        with pytest.raises(OverloadedError):
            await anext(orchestrator.generate(request()))

        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert orchestrator.admission.num_in_flight == 0

    asyncio.run(story())


def test_the_least_loaded_replica_wins_by_own_requests_first():
    busy = snapshot("b", num_waiting_tokens=500)

    assert least_loaded([busy, IDLE], {}, random.Random(0)) == IDLE
    assert least_loaded([busy, IDLE], {"a": 1}, random.Random(0)) == busy
    assert least_loaded([], {}, random.Random(0)) is None


def test_equal_replicas_are_chosen_at_random():
    equal = [snapshot(name) for name in "abc"]
    rng = random.Random(0)

    chosen = {least_loaded(equal, {}, rng).replica_id for _ in range(60)}

    assert chosen == {"a", "b", "c"}
