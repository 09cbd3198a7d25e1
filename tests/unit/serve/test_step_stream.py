"""The router's end of a subscription, over scripted messages."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.serve.step_stream import StepStream


def chunk(request_id: str, token_id: int) -> TokenChunk:
    return TokenChunk(request_id=request_id, token_ids=(token_id,))


async def opened(messages: AsyncIterator[list[TokenChunk]]) -> StepStream:
    stream = StepStream("replica", messages, cancel=lambda: None)
    await stream.start()
    return stream


def test_chunks_reach_the_request_they_belong_to():
    async def run() -> None:
        go = asyncio.Event()

        async def messages():
            yield []
            await go.wait()
            yield [chunk("a", 1), chunk("b", 2), chunk("unknown", 3)]
            yield [chunk("a", 4)]

        stream = await opened(messages())
        a, b = stream.open("a"), stream.open("b")
        go.set()

        assert [(await a.get()).token_ids for _ in range(2)] == [(1,), (4,)]
        assert (await b.get()).token_ids == (2,)

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, RuntimeError("broken"), asyncio.CancelledError()])
def test_every_request_learns_that_the_stream_ended(error):
    async def run() -> None:
        go = asyncio.Event()

        async def messages():
            yield []
            await go.wait()
            if error is not None:
                raise error

        stream = await opened(messages())
        before = stream.open("before")
        go.set()

        assert isinstance(await before.get(), WorkerLostError)
        assert stream.has_ended
        assert isinstance(stream.open("after").get_nowait(), WorkerLostError)

    asyncio.run(run())


def test_a_replica_that_refuses_the_subscription_is_lost():
    async def run() -> None:
        async def messages():
            raise WorkerLostError("draining")
            yield []

        with pytest.raises(WorkerLostError, match="cannot subscribe to replica: draining"):
            await opened(messages())

    asyncio.run(run())
