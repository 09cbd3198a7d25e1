"""A client that leaves at any point: one abort at the replica in charge, no lease left, the place given back."""

import asyncio
from collections.abc import Callable

import pytest

from dsv4_cluster.errors import OverloadedError
from tests.kit.scripted_replicas import HANG, ScriptedDecode, ScriptedPrefill, chunk, request


def assert_books_close(orchestrator, prefill: ScriptedPrefill, decode: ScriptedDecode) -> None:
    assert orchestrator.admission.num_in_flight == 0
    taken_or_released = {*decode.taken_over, *prefill.released}
    assert set(prefill.published) == taken_or_released
    assert len(prefill.released) == len(set(prefill.released))
    assert decode.num_aborted + decode.num_ended <= len(decode.requests)


async def cancel_when(
    orchestrator, is_time: Callable[[list[int]], bool], event: asyncio.Event | None = None
) -> list[int]:
    """Read the stream on a task of its own and cancel that task at the given moment."""
    tokens: list[int] = []
    progress = asyncio.Event()

    async def read() -> None:
        stream = orchestrator.generate(request())
        try:
            async for piece in stream:
                tokens.extend(piece.token_ids)
                progress.set()
        finally:
            await stream.aclose()

    task = asyncio.create_task(read())
    async with asyncio.timeout(5):
        if event is not None:
            await event.wait()
        while not is_time(tokens):
            progress.clear()
            await progress.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await orchestrator.close()
    return tokens


def test_cancelled_during_prefill(make_orchestrator):
    async def story():
        prefill, decode = ScriptedPrefill([HANG]), ScriptedDecode()
        orchestrator = make_orchestrator(prefill, decode)

        tokens = await cancel_when(orchestrator, lambda _: True, prefill.called)

        assert tokens == []
        assert (prefill.num_aborted, decode.requests) == (1, [])
        assert_books_close(orchestrator, prefill, decode)

    asyncio.run(story())


def test_cancelled_during_the_handoff(make_orchestrator):
    async def story():
        prefill, decode = ScriptedPrefill(), ScriptedDecode([[HANG]])
        orchestrator = make_orchestrator(prefill, decode)

        tokens = await cancel_when(orchestrator, lambda _: True, decode.called)

        assert tokens == [11]
        assert (prefill.num_aborted, decode.num_aborted) == (0, 1)
        assert prefill.released == ["ticket-0"]
        assert_books_close(orchestrator, prefill, decode)

    asyncio.run(story())


def test_cancelled_during_decode(make_orchestrator):
    async def story():
        prefill, decode = ScriptedPrefill(), ScriptedDecode([[chunk(12), chunk(13), HANG]])
        orchestrator = make_orchestrator(prefill, decode)

        tokens = await cancel_when(orchestrator, lambda tokens: len(tokens) == 3)

        assert tokens == [11, 12, 13]
        assert (prefill.num_aborted, decode.num_aborted, prefill.released) == (0, 1, [])
        assert_books_close(orchestrator, prefill, decode)

    asyncio.run(story())


@pytest.mark.parametrize("num_read", range(6))
def test_closed_between_chunks(make_orchestrator, num_read):
    async def story():
        prefill, decode = ScriptedPrefill(), ScriptedDecode()
        orchestrator = make_orchestrator(prefill, decode)
        stream = orchestrator.generate(request())

        for _ in range(num_read):
            await anext(stream, None)
        await stream.aclose()
        await stream.aclose()
        await orchestrator.close()

        was_cut = 2 <= num_read <= 4  # decode had started and not finished
        assert decode.num_aborted == was_cut
        assert prefill.released == (["ticket-0"] if num_read == 1 else [])
        assert_books_close(orchestrator, prefill, decode)

    asyncio.run(story())


def test_a_stuck_release_holds_nobody_up(make_orchestrator, monkeypatch):
    monkeypatch.setattr("dsv4_cluster.router.orchestrator.RELEASE_TIMEOUT_S", 0.05)

    async def story():
        prefill, decode = ScriptedPrefill(is_release_stuck=True), ScriptedDecode([[OverloadedError("no pages")]])
        orchestrator = make_orchestrator(prefill, decode)

        tokens = [token async for piece in orchestrator.generate(request()) for token in piece.token_ids]
        await orchestrator.close()

        assert tokens == [11, 12, 13, 14, 1]

    asyncio.run(story())


def test_many_requests_cancelled_at_random_points_leave_nothing_behind(make_orchestrator):
    async def story():
        prefill, decode = ScriptedPrefill(), ScriptedDecode()
        orchestrator = make_orchestrator(prefill, decode)

        async def read(num_turns: int) -> None:
            stream = orchestrator.generate(request())
            try:
                async for _ in stream:
                    for _ in range(num_turns % 3):
                        await asyncio.sleep(0)
            finally:
                await stream.aclose()

        tasks = [asyncio.create_task(read(n)) for n in range(60)]
        for turn in range(40):
            await asyncio.sleep(0)
            tasks[turn].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await orchestrator.close()

        assert orchestrator.admission.num_in_flight == 0
        assert decode.num_aborted + decode.num_ended == len(decode.requests)
        num_ended_normally = decode.num_ended
        assert num_ended_normally >= 20

    asyncio.run(story())
