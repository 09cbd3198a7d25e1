"""The bounded store of responses."""

import asyncio
import contextlib
import json
import random

import pytest

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.config.responses_config import ResponsesConfig
from dsv4_cluster.errors import OverloadedError
from dsv4_cluster.frontend.response_store import WATCH_GRACE_S, LocalResponseStore
from dsv4_cluster.protocol.stored_response import StoredResponse

TTL_S = 100.0


def record(name, *, tenant="a", status="completed", size=0) -> StoredResponse:
    return StoredResponse(
        response_id=name,
        tenant=tenant,
        body=json.dumps({"id": name, "status": status}),
        items="x" * size,
        is_over=status == "completed",
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock) -> LocalResponseStore:
    return LocalResponseStore(ResponsesConfig(max_entries=3, max_bytes=1 << 16, ttl_s=TTL_S), clock)


async def names(store, *wanted) -> list[str]:
    return [name for name in wanted if await store.get("a", name) is not None]


def test_nobody_finds_what_belongs_to_another_tenant(store):
    async def run() -> None:
        await store.add(record("r"))
        assert await store.get("b", "r") is None
        assert not await store.delete("b", "r")
        assert not await store.replace(record("r", tenant="b"))
        assert await store.wait_until_over("b", "r", 0)
        assert await store.get("a", "r") == record("r")

    asyncio.run(run())


def test_the_least_recently_used_one_goes_first(store):
    async def run() -> None:
        for name in ("r1", "r2", "r3"):
            await store.add(record(name))
        await store.get("a", "r1")
        await store.add(record("r4"))
        assert await names(store, "r1", "r2", "r3", "r4") == ["r1", "r3", "r4"]

    asyncio.run(run())


def test_bytes_are_bounded_and_accounted(store):
    async def run() -> None:
        for name in ("r1", "r2", "r3"):
            await store.add(record(name, size=30_000))
        assert await names(store, "r1", "r2", "r3") == ["r2", "r3"]
        assert store.num_bytes == sum(record(name, size=30_000).num_bytes for name in ("r2", "r3"))
        await store.add(record("huge", size=1 << 16))
        assert await names(store, "huge", "r2", "r3") == ["r2", "r3"]
        for name in ("r2", "r3"):
            await store.delete("a", name)
        assert (store.num_bytes, len(store)) == (0, 0)

    asyncio.run(run())


def test_what_is_not_used_is_forgotten_after_its_time(store, clock):
    async def run() -> None:
        await store.add(record("r1"))
        await store.add(record("r2"))
        clock.advance(TTL_S - 1)
        await store.get("a", "r2")
        clock.advance(2)
        assert await names(store, "r1", "r2") == ["r2"]

    asyncio.run(run())


def test_responses_under_way_are_not_dropped_for_others(store):
    async def run() -> None:
        for name in ("r1", "r2", "r3"):
            await store.add(record(name, status="queued"))
        with pytest.raises(OverloadedError, match="3 with"):
            await store.add(record("r4"))
        assert await store.replace(record("r1"))
        await store.add(record("r4"))
        assert await names(store, "r1", "r2", "r3", "r4") == ["r2", "r3", "r4"]

    asyncio.run(run())


def test_what_is_over_is_not_replaced(store):
    async def run() -> None:
        await store.add(record("r", status="in_progress"))
        assert await store.replace(record("r"))
        assert not await store.replace(record("r", size=9))
        assert await store.get("a", "r") == record("r")

    asyncio.run(run())


@pytest.mark.parametrize("how", ["replace", "delete"])
def test_a_waiter_hears_of_the_end_at_once(store, how):
    async def run() -> None:
        await store.add(record("r", status="in_progress"))
        waiter = asyncio.ensure_future(store.wait_until_over("a", "r", 30))
        await asyncio.sleep(0)
        assert not waiter.done()
        await (store.replace(record("r")) if how == "replace" else store.delete("a", "r"))
        assert await asyncio.wait_for(waiter, 5)

    asyncio.run(run())


def test_a_response_whose_router_is_gone_has_failed(store, clock):
    async def run() -> None:
        await store.add(record("r", status="in_progress"))
        clock.advance(WATCH_GRACE_S + 1)
        waiter = asyncio.ensure_future(store.wait_until_over("a", "r", 30))
        await asyncio.sleep(0)
        watched = await store.get("a", "r")
        waiter.cancel()
        await asyncio.wait([waiter])
        clock.advance(WATCH_GRACE_S + 1)
        lost = await store.get("a", "r")
        assert (watched.is_over, lost.is_over) == (False, True)
        assert json.loads(lost.body)["status"] == "failed"

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(4))
def test_bytes_and_entries_are_accounted_whatever_happens(store, clock, seed):
    rng = random.Random(seed)

    async def run() -> None:
        for _ in range(400):
            name, size = f"r{rng.randrange(6)}", rng.randrange(30_000)
            status = rng.choice(["queued", "completed"])
            with contextlib.suppress(OverloadedError):
                step = rng.randrange(5)
                if step == 0:
                    await store.add(record(name, status=status, size=size))
                elif step == 1:
                    await store.replace(record(name, status=status, size=size))
                elif step == 2:
                    await store.delete("a", name)
                elif step == 3:
                    clock.advance(rng.random() * TTL_S)
                else:
                    await store.get("a", name)
            kept = [found for n in range(6) if (found := await store.get("a", f"r{n}")) is not None]
            assert store.num_bytes == sum(found.num_bytes for found in kept)
            assert len(store) == len(kept) <= 3

    asyncio.run(run())
