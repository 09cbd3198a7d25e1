"""Answers that watch their client: server-sent events, and whole answers that stop when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv4_cluster.frontend.error_body import describe, openai_envelope

T = TypeVar("T")

DONE = "[DONE]"
# no-transform and x-accel-buffering keep proxies from collecting events
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


class NamedEvent(NamedTuple):
    """One event of a stream whose events have names."""

    name: str
    data: str  # JSON


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as the client disconnects. The request body has been read before.

    Raises: ClientDisconnect once the work has unwound; otherwise what the work raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def sse_frames(groups: AsyncGenerator[Sequence[str], None], request_id: str) -> AsyncGenerator[bytes, None]:
    """Frames of a stream of JSON texts, one bytes object per group, ending with [DONE].

    An exception before the first frame is raised, so that it becomes a proper HTTP answer. Afterwards it becomes one
    error event and the stream ends without [DONE].
    """
    is_started = False
    try:
        async for texts in groups:
            if texts:
                yield b"".join(map(_frame, texts))
                is_started = True
        yield _frame(DONE)
    except Exception as err:
        if not is_started:
            raise
        yield _frame(openai_envelope(describe(err, request_id), request_id))
    finally:
        await groups.aclose()


async def named_frames(
    groups: AsyncGenerator[Sequence[NamedEvent], None], on_error: Callable[[Exception], Sequence[NamedEvent]]
) -> AsyncGenerator[bytes, None]:
    """Frames of a stream of named events, one bytes object per group; such a stream has no [DONE].

    An exception before the first frame is raised; afterwards `on_error` says which events end the stream.
    """
    is_started = False
    try:
        async for events in groups:
            if events:
                yield b"".join(map(_named_frame, events))
                is_started = True
    except Exception as err:
        if not is_started:
            raise
        yield b"".join(map(_named_frame, on_error(err)))
    finally:
        await groups.aclose()


class EventStream(Response):
    """A started stream: the first frame is known to be good, the others follow as they come."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._frames = frames

    @classmethod
    async def open(cls, receive: Receive, frames: AsyncGenerator[bytes, None]) -> "EventStream":
        """Wait for the first frame. Raises: the stream's first exception, or ClientDisconnect."""
        return cls(await while_connected(receive, _first_frame(frames)), frames)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._pump(send))
        except ClientDisconnect:
            return
        finally:
            await self._frames.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first_frame(frames: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(frames)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _frame(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def _named_frame(event: NamedEvent) -> bytes:
    return f"event: {event.name}\ndata: {event.data}\n\n".encode()
