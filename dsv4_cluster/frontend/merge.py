"""Several streams as one, in the order in which items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    """A stream is over, with or without an exception."""

    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (stream index, item). The first exception of any stream is raised; then, and when closed early, every
    stream is closed. A slow consumer holds the streams back.
    """
    queue: asyncio.Queue[tuple[int, _Item[T] | _End]] = asyncio.Queue(maxsize=2 * len(streams))
    tasks = [asyncio.ensure_future(_feed(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, _Item):
                yield index, item.value
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(index: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, _Item[T] | _End]]) -> None:
    error: Exception | None = None
    try:
        async for value in stream:
            await queue.put((index, _Item(value)))
    except Exception as err:
        error = err
    finally:
        await stream.aclose()
    await queue.put((index, _End(error)))
