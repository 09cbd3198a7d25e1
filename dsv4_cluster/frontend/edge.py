"""The outermost layer of the app: a request id for every answer, and a bound on requests in flight."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4_cluster.errors import OverloadedError
from dsv4_cluster.frontend.caller import ANONYMOUS
from dsv4_cluster.frontend.error_body import error_response
from dsv4_cluster.ids import new_request_id

REQUEST_ID_HEADERS = ("x-request-id", "request-id")  # the names that OpenAI's and Anthropic's clients read


class EdgeMiddleware:
    """Sets `state.request_id`, `state.caller` and the id's header; a POST above the bound gets 429, its body unread."""

    def __init__(self, app: ASGIApp, *, max_in_flight: int) -> None:
        self._app = app
        self._max_in_flight = max_in_flight
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["caller"] = ANONYMOUS

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict.fromkeys(REQUEST_ID_HEADERS, request_id))
            await send(message)

        if scope["method"] != "POST":
            await self._app(scope, receive, send_with_id)
            return
        if self._num_in_flight >= self._max_in_flight:
            err = OverloadedError(
                f"{self._num_in_flight} requests are in flight, router.max_ongoing_requests is {self._max_in_flight}; "
                "try again later"
            )
            await error_response(err, request_id, scope["path"])(scope, receive, send_with_id)
            return
        self._num_in_flight += 1
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._num_in_flight -= 1
