"""What Serve's HTTP proxy runs around its own middleware; `environment.py` has the setting by which Ray finds it.

The proxy appends an `x-request-id` of its own to every answer. The router's, which is in the log, is there already, and
clients that read the header would see both in one value.
"""

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NAME = "x-request-id"


class OneRequestId:
    """Keeps the first request id of an answer: the application's when it has one, else the proxy's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_one(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = Headers(scope=message).getlist(_NAME)
                if len(ids) > 1:
                    others = [(name, value) for name, value in message["headers"] if name.lower() != _NAME.encode()]
                    message = {**message, "headers": [*others, (_NAME.encode(), ids[0].encode("latin-1"))]}
            await send(message)

        await self._app(scope, receive, send_one)


def middlewares() -> list[Middleware]:
    """For the proxy, around its own."""
    return [Middleware(OneRequestId)]
