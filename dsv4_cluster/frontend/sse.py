"""Answers that watch their client: server-sent events, and whole answers that stop when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = "[DONE]"
KEEP_ALIVE = b": keep-alive\n\n"  # the comment that the hosted DeepSeek API sends
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


async def sse_frames(groups: AsyncGenerator[Sequence[str], None]) -> AsyncGenerator[bytes, None]:
    """Frames of a stream of JSON texts, one bytes object per group, ending with [DONE].

    Raises: what `groups` raises.
    """
    async with aclosing(groups):
        async for texts in groups:
            if texts:
                yield b"".join(map(json_frame, texts))
        yield json_frame(DONE)


async def named_frames(groups: AsyncGenerator[Sequence[NamedEvent], None]) -> AsyncGenerator[bytes, None]:
    """Frames of a stream of named events, one bytes object per group; such a stream has no [DONE].

    Raises: what `groups` raises.
    """
    async with aclosing(groups):
        async for events in groups:
            if events:
                yield b"".join(map(named_frame, events))


class EventStream(Response):
    """A stream of frames. While there is none to send, `keep_alive` goes out every `keep_alive_s` seconds."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[bytes],
        frames: AsyncGenerator[bytes, None],
        on_error: Callable[[Exception], bytes],
        keep_alive_s: float,
        keep_alive: bytes,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._frames = frames
        self._on_error = on_error
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._sent_s = 0.0  # when the last frame went out

    @classmethod
    async def open(
        cls,
        receive: Receive,
        frames: AsyncGenerator[bytes, None],
        *,
        on_error: Callable[[Exception], bytes],
        keep_alive_s: float,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> "EventStream":
        """Wait for the first frame, but not longer than `keep_alive_s`. on_error: the last frame of a broken stream.

        Raises: an exception in place of the first frame, so that it becomes a proper HTTP answer; ClientDisconnect.
        """
        first = asyncio.ensure_future(_first_frame(frames))
        try:
            await while_connected(receive, _done_or_late(first, keep_alive_s))
            if first.done():
                first.result()
        except BaseException:
            await _cancelled(first)
            await frames.aclose()
            raise
        return cls(first, frames, on_error, keep_alive_s, keep_alive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._pump(send))
        except ClientDisconnect:
            return
        finally:
            await _cancelled(self._first)
            await self._frames.aclose()

    async def _pump(self, send: Send) -> None:
        if not self._first.done():
            await self._send(send, self._keep_alive)
        ticker = asyncio.ensure_future(self._tick(send))
        try:
            await self._send(send, await self._first)
            async for frame in self._frames:
                await self._send(send, frame)
        except Exception as err:
            await self._send(send, self._on_error(err))
        finally:
            await _cancelled(ticker)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, frame: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _tick(self, send: Send) -> None:
        """Beside the frames and not around them: a stream of thousands of frames pays for no timer."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + self._keep_alive_s - clock()))
            if clock() - self._sent_s >= self._keep_alive_s:
                await self._send(send, self._keep_alive)


class WholeAnswer(Response):
    """A JSON body that takes long: line ends go out every `keep_alive_s` seconds, white space in front of the JSON."""

    media_type = "application/json"

    def __init__(self, work: asyncio.Future[str], on_error: Callable[[Exception], str], keep_alive_s: float) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._work = work
        self._on_error = on_error
        self._keep_alive_s = keep_alive_s

    @classmethod
    async def of(
        cls,
        receive: Receive,
        work: Coroutine[Any, Any, str],
        *,
        on_error: Callable[[Exception], str],
        keep_alive_s: float,
    ) -> Response:
        """The body that `work` returns. on_error: the body of an answer that has begun, status 200, and then fails.

        Raises: what the work raises within `keep_alive_s`; ClientDisconnect.
        """
        task = asyncio.ensure_future(work)
        try:
            await while_connected(receive, _done_or_late(task, keep_alive_s))
            if task.done():
                return Response(task.result(), media_type=cls.media_type)
        except BaseException:
            await _cancelled(task)
            raise
        return cls(task, on_error, keep_alive_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await while_connected(receive, self._pump(send))
        except ClientDisconnect:
            return
        finally:
            await _cancelled(self._work)

    async def _pump(self, send: Send) -> None:
        while not self._work.done():
            await send({"type": "http.response.body", "body": b"\n", "more_body": True})
            await _done_or_late(self._work, self._keep_alive_s)
        err = self._work.exception()
        if err is not None and not isinstance(err, Exception):
            raise err
        text = self._work.result() if err is None else self._on_error(err)
        await send({"type": "http.response.body", "body": text.encode(), "more_body": False})


async def _first_frame(frames: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(frames)


async def _done_or_late(work: asyncio.Future[Any], limit_s: float) -> None:
    await asyncio.wait({work}, timeout=limit_s)


async def _cancelled(work: asyncio.Future[Any]) -> None:
    """Cancel and wait until it has unwound; what it raised has been dealt with, or nobody is left to hear of it."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_frame(data: str) -> bytes:
    """One event without a name."""
    return f"data: {data}\n\n".encode()


def named_frame(event: NamedEvent) -> bytes:
    """One event with a name."""
    return f"event: {event.name}\ndata: {event.data}\n\n".encode()
