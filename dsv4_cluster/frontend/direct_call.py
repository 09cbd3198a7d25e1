"""Calling an endpoint of this process without HTTP: lines of batches take the same way as requests from outside."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from dsv4_cluster.errors import Dsv4Error
from dsv4_cluster.frontend.caller import Caller
from dsv4_cluster.frontend.edge import Gate, access_log
from dsv4_cluster.frontend.error_body import error_response
from dsv4_cluster.frontend.generation import Backend
from dsv4_cluster.ids import new_request_id

NEVER_S = 7 * 24 * 3600.0  # later than any answer: signs of life would fix the status before it is known

Endpoint = Callable[[Request, Backend], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectAnswer:
    """What a client would have got."""

    status: int
    request_id: str
    body: bytes
    failure: Dsv4Error | None  # what the body tells, when a typed error was raised


class DirectCalls:
    """The endpoints of one app."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        backend: Backend,
        gate: Gate,
    ) -> None:
        """endpoints: by path."""
        api = backend.config.api.model_copy(update={"keep_alive_s": NEVER_S})
        self._backend = dataclasses.replace(backend, config=backend.config.model_copy(update={"api": api}))
        self._endpoints = dict(endpoints)
        self._gate = gate

    async def post(self, path: str, body: bytes, caller: Caller) -> DirectAnswer:
        """Answer a request that is not streamed and that nobody waits for; it takes a place at the gate.

        Cancelling it aborts the generation.
        """
        request_id = new_request_id()
        started_s = time.monotonic()
        request = _request(path, body, request_id, caller)
        failure: Dsv4Error | None = None
        try:
            with self._gate.place(caller, is_background=True):
                response = await self._endpoints[path](request, self._backend)
                status, text = await _sent(response, request)
        except Exception as err:
            failure = err if isinstance(err, Dsv4Error) else None
            response = error_response(err, request_id, path)
            status, text = response.status_code, bytes(response.body)
        elapsed_ms = (time.monotonic() - started_s) * 1e3
        access_log.info("%s BATCH %s %d %.0f ms key=%s", request_id, path, status, elapsed_ms, caller.key_name or "-")
        return DirectAnswer(status=status, request_id=request_id, body=text, failure=failure)


def _request(path: str, body: bytes, request_id: str, caller: Caller) -> Request:
    """A POST whose client never leaves."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [],
        "state": {"request_id": request_id, "caller": caller},
    }
    return Request(scope, receive)


async def _sent(response: Response, request: Request) -> tuple[int, bytes]:
    """Status and body as they would go over the wire."""
    body = bytearray()

    async def send(message: Message) -> None:
        body.extend(message.get("body", b""))

    await response(request.scope, request.receive, send)
    return response.status_code, bytes(body)
