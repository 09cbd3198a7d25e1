"""What a router knows about replicas, from scripted polls."""

import asyncio

import pytest
from ray.serve.exceptions import RayServeException

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.errors import LayoutMismatchError, WorkerLostError
from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.serve import directory
from dsv4_cluster.serve.directory import ReplicaDirectory, missing_replicas
from tests.kit.snapshots import snapshot


class Polls:
    """Answers of successive polls; the last one repeats. An exception is raised."""

    def __init__(self, *answers: list[ReplicaSnapshot] | Exception) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def __call__(self) -> list[ReplicaSnapshot]:
        self.num_asked += 1
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_replica_with_the_fewest_own_calls_is_picked():
    async def run() -> None:
        replicas = ReplicaDirectory("decode", Polls([snapshot("a"), snapshot("b", num_running=5)]))
        with replicas.in_flight((await replicas.pick()).replica_id):
            assert (await replicas.pick()).replica_id == "b"
        assert (await replicas.pick()).replica_id == "a"

    asyncio.run(run())


def test_a_pick_waits_for_a_replica_to_come_up(monkeypatch):
    monkeypatch.setattr(directory, "RETRY_PERIOD_S", 0.0)
    polls = Polls([], RayServeException("no replica"), TimeoutError(), [snapshot("late")])

    assert asyncio.run(ReplicaDirectory("decode", polls).pick()).replica_id == "late"
    assert polls.num_asked == 4


def test_a_pick_gives_up_when_nothing_comes_up(monkeypatch):
    clock = ManualClock()

    async def nobody() -> list[ReplicaSnapshot]:
        clock.advance(directory.REPLACE_WAIT_S)
        return []

    monkeypatch.setattr(directory, "RETRY_PERIOD_S", 0.0)
    with pytest.raises(WorkerLostError, match="no decode replica"):
        asyncio.run(ReplicaDirectory("decode", nobody, clock=clock).pick())


def test_other_layouts_are_refused_with_both_names():
    replicas = ReplicaDirectory("decode", Polls([snapshot("a", layout_id="old")]))

    with pytest.raises(LayoutMismatchError, match=r"decode replicas have cache layout old, the other side has new"):
        asyncio.run(replicas.pick(frozenset({"new"})))


def test_only_replicas_of_a_fitting_layout_are_picked():
    replicas = ReplicaDirectory("decode", Polls([snapshot("a", layout_id="old"), snapshot("b", layout_id="new")]))

    assert asyncio.run(replicas.pick(frozenset({"new"}))).replica_id == "b"


def test_a_lost_replica_is_not_picked_until_it_answers_a_later_poll():
    async def run() -> None:
        clock = ManualClock()
        replicas = ReplicaDirectory("decode", Polls([snapshot("a"), snapshot("b")]), clock=clock)
        await replicas.refresh()
        clock.advance(1)

        replicas.mark_lost("a")

        assert {(await replicas.pick()).replica_id for _ in range(20)} == {"b"}
        clock.advance(1)
        await replicas.refresh()
        assert replicas.is_live("a")

    asyncio.run(run())


def test_a_poll_that_was_under_way_does_not_bring_a_lost_replica_back():
    async def run() -> None:
        clock = ManualClock()
        asked, answer = asyncio.Event(), asyncio.Event()

        async def slow_poll() -> list[ReplicaSnapshot]:
            asked.set()
            await answer.wait()
            return [snapshot("a")]

        replicas = ReplicaDirectory("decode", slow_poll, clock=clock)
        refresh = asyncio.create_task(replicas.refresh())
        await asked.wait()
        clock.advance(1)
        replicas.mark_lost("a")
        answer.set()
        await refresh

        assert not replicas.is_live("a")

    asyncio.run(run())


def test_what_is_missing_names_the_role_or_both_layouts():
    async def missing(prefills: list[ReplicaSnapshot], decodes: list[ReplicaSnapshot]) -> list[str]:
        roles = [ReplicaDirectory("prefill", Polls(prefills)), ReplicaDirectory("decode", Polls(decodes))]
        for role in roles:
            await role.refresh()
        return missing_replicas(*roles)

    one, other = snapshot("a", layout_id="L1"), snapshot("b", layout_id="L2")

    assert asyncio.run(missing([one], [one, other])) == []
    assert asyncio.run(missing([], [one])) == ["no prefill replica is up"]
    assert asyncio.run(missing([], [])) == ["no prefill replica is up", "no decode replica is up"]
    (mismatch,) = asyncio.run(missing([one], [other]))
    assert "prefill replicas have cache layout L1, decode replicas have cache layout L2" in mismatch
