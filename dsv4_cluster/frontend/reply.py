"""The answer to a request, streamed or whole, in the envelope of its path when it fails after it has begun."""

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dsv4_cluster.frontend.error_body import described_json
from dsv4_cluster.frontend.generation import Backend
from dsv4_cluster.frontend.sse import (
    KEEP_ALIVE,
    EventStream,
    NamedEvent,
    WholeAnswer,
    json_frame,
    named_frame,
    named_frames,
    sse_frames,
)


async def whole_reply(request: Request, backend: Backend, work: Coroutine[Any, Any, str]) -> Response:
    """The JSON that `work` returns. Raises: what the work raises before the first sign of life; ClientDisconnect."""
    state, path = request.state, request.url.path
    return await WholeAnswer.of(
        request.receive,
        work,
        on_error=lambda err: described_json(err, state.request_id, path),
        keep_alive_s=backend.config.api.keep_alive_s,
    )


async def stream_reply(request: Request, backend: Backend, groups: AsyncGenerator[Sequence[str], None]) -> Response:
    """JSON texts as events, [DONE] at the end. Raises: an exception before the first event; ClientDisconnect."""
    state, path = request.state, request.url.path
    return await EventStream.open(
        request.receive,
        sse_frames(groups),
        on_error=lambda err: json_frame(described_json(err, state.request_id, path)),
        keep_alive_s=backend.config.api.keep_alive_s,
    )


async def named_reply(
    request: Request,
    backend: Backend,
    groups: AsyncGenerator[Sequence[NamedEvent], None],
    on_error: Callable[[Exception], Sequence[NamedEvent]],
    *,
    keep_alive: bytes = KEEP_ALIVE,
) -> Response:
    """Events with names. on_error: those that end a stream that breaks. keep_alive: the frame that says nothing.

    Raises: an exception before the first event; ClientDisconnect.
    """
    return await EventStream.open(
        request.receive,
        named_frames(groups),
        on_error=lambda err: b"".join(map(named_frame, on_error(err))),
        keep_alive_s=backend.config.api.keep_alive_s,
        keep_alive=keep_alive,
    )
