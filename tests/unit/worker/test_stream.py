"""The fan-out of engine steps to routers."""

import asyncio

import pytest

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from dsv4_cluster.worker.stream import ROUTER_SILENCE_S, StepFanout


class Fixture:
    """A fan-out that remembers what it aborted."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.clock = ManualClock()
        self.fanout = StepFanout(self.aborted.append, self.clock)

    async def subscribed(self, router_id: str):
        stream = self.fanout.subscribe(router_id)
        assert await anext(stream) == []
        return stream


def chunk(request_id: str, token_id: int = 1, *, finish_reason: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(request_id=request_id, token_ids=(token_id,), finish_reason=finish_reason)


def test_one_step_is_one_message_per_router():
    async def run() -> None:
        f = Fixture()
        a, b = await f.subscribed("a"), await f.subscribed("b")
        for request_id, router_id in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            f.fanout.register(request_id, router_id)

        f.fanout.publish([chunk("a1"), chunk("b1"), chunk("a2")])

        assert [c.request_id for c in await anext(a)] == ["a1", "a2"]
        assert [c.request_id for c in await anext(b)] == ["b1"]

    asyncio.run(run())


def test_messages_that_piled_up_are_joined_in_order():
    async def run() -> None:
        f = Fixture()
        stream = await f.subscribed("a")
        f.fanout.register("a1", "a")

        for token_id in range(3):
            f.fanout.publish([chunk("a1", token_id)])

        assert [c.token_ids for c in await anext(stream)] == [(0,), (1,), (2,)]

    asyncio.run(run())


def test_tokens_of_unknown_finished_and_forgotten_requests_go_nowhere():
    async def run() -> None:
        f = Fixture()
        stream = await f.subscribed("a")
        for request_id in ("done", "forgotten", "live"):
            f.fanout.register(request_id, "a")
        f.fanout.publish([chunk("done", finish_reason=FinishReason.LENGTH)])
        f.fanout.forget("forgotten")

        f.fanout.publish([chunk("done", 2), chunk("forgotten"), chunk("never-seen"), chunk("live")])

        assert [c.request_id for c in await anext(stream)] == ["done", "live"]
        assert f.fanout.num_requests == 1

    asyncio.run(run())


def test_a_closed_subscription_aborts_the_requests_of_its_router_only():
    async def run() -> None:
        f = Fixture()
        a, _b = await f.subscribed("a"), await f.subscribed("b")
        f.fanout.register("a1", "a")
        f.fanout.register("b1", "b")

        await a.aclose()

        assert f.aborted == ["a1"]
        assert f.fanout.wants("b1")

    asyncio.run(run())


def test_a_router_without_subscription_cannot_place_requests():
    f = Fixture()

    with pytest.raises(WorkerLostError, match="not subscribed"):
        f.fanout.register("r", "nobody")


def test_a_second_subscription_replaces_the_first_and_drops_its_requests():
    async def run() -> None:
        f = Fixture()
        first = await f.subscribed("a")
        f.fanout.register("old", "a")

        second = await f.subscribed("a")
        f.fanout.register("new", "a")
        f.fanout.publish([chunk("new")])

        assert f.aborted == ["old"]
        assert [c.request_id for c in await anext(second)] == ["new"]
        with pytest.raises(WorkerLostError, match="subscribed again"):
            await anext(first)

    asyncio.run(run())


def test_a_lost_gang_ends_every_subscription_after_its_last_tokens():
    async def run() -> None:
        f = Fixture()
        stream = await f.subscribed("a")
        f.fanout.register("a1", "a")
        f.fanout.publish([chunk("a1")])

        f.fanout.fail(WorkerLostError("gone"))

        assert [c.request_id for c in await anext(stream)] == ["a1"]
        with pytest.raises(WorkerLostError, match="gone"):
            await anext(stream)
        with pytest.raises(WorkerLostError, match="gone"):
            await anext(f.fanout.subscribe("b"))

    asyncio.run(run())


def test_a_router_that_falls_silent_while_another_speaks_is_gone():
    async def run() -> None:
        f = Fixture()
        await f.subscribed("silent")
        f.fanout.hear("silent")
        f.fanout.register("r", "silent")

        f.clock.advance(ROUTER_SILENCE_S + 1)
        f.fanout.hear("other")

        assert f.aborted == ["r"]

    asyncio.run(run())


def test_silence_of_all_routers_ends_nothing():
    async def run() -> None:
        f = Fixture()
        stream = await f.subscribed("a")
        f.fanout.hear("a")
        f.fanout.register("r", "a")

        f.clock.advance(10 * ROUTER_SILENCE_S)
        f.fanout.publish([chunk("r")])

        assert f.aborted == []
        assert [c.request_id for c in await anext(stream)] == ["r"]

    asyncio.run(run())
