"""The outermost layer of the app: a request id for every answer, who calls, and whether there is room for the request.

Everything here is decided from the head of a request: a body that will not be answered is not read.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4_cluster.errors import DrainingError, Dsv4Error, OverloadedError
from dsv4_cluster.frontend.auth import Keyring
from dsv4_cluster.frontend.caller import ANONYMOUS, Caller
from dsv4_cluster.frontend.error_body import CLIENT_GONE_STATUS, error_response
from dsv4_cluster.frontend.quota import Quotas, places
from dsv4_cluster.ids import new_request_id

REQUEST_ID_HEADERS = ("x-request-id", "request-id")  # the names that OpenAI's and Anthropic's clients read

access_log = logging.getLogger("dsv4_cluster.access")  # ids, names and numbers; never a word of a prompt or an answer


class Gate:
    """Who and how much may come in. One per app; belongs to its event loop."""

    def __init__(self, keyring: Keyring, quotas: Quotas, *, max_in_flight: int) -> None:
        """max_in_flight: requests that compute something, over all callers."""
        self._keyring = keyring
        self._quotas = quotas
        self._max_in_flight = max_in_flight
        self.num_in_flight = 0
        self.is_draining = False

    def identify(self, path: str, headers: Headers) -> Caller:
        """Raises: AuthError."""
        return self._keyring.identify(path, headers)

    @contextmanager
    def place(self, caller: Caller, *, is_background: bool = False) -> Iterator[None]:
        """Hold one place for the length of the block. is_background: nobody waits, so half of the places stay free.

        Raises: DrainingError, OverloadedError with the limit.
        """
        if self.is_draining:
            raise DrainingError("this router is about to stop and takes no new requests; try again")
        if self.num_in_flight >= places(self._max_in_flight, is_background=is_background):
            raise OverloadedError(
                f"{self.num_in_flight} requests are in flight, router.max_ongoing_requests is {self._max_in_flight}; "
                "try again later"
            )
        with self._quotas.in_flight(caller, is_background=is_background):
            self.num_in_flight += 1
            try:
                yield
            finally:
                self.num_in_flight -= 1


class EdgeMiddleware:
    """Sets `state.request_id` and `state.caller`; a POST takes a place at the gate before its body is read, and holds
    it in `state.place`, where work that goes on without the request takes it over.
    """

    def __init__(self, app: ASGIApp, *, gate: Gate, on_answer: Callable[[str, int], None]) -> None:
        """on_answer: hears the route and the status of every answer."""
        self._app = app
        self._gate = gate
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["caller"] = ANONYMOUS
        started_s = time.monotonic()
        status = CLIENT_GONE_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict.fromkeys(REQUEST_ID_HEADERS, request_id))
                status = message["status"]
            await send(message)

        try:
            await self._enter(scope, receive, send_with_id)
        finally:
            self._on_answer(_route(scope), status)
            access_log.info(
                "%s %s %s %d %.0f ms key=%s",
                request_id,
                scope["method"],
                quote(scope["path"]),  # nobody writes lines into our log
                status,
                (time.monotonic() - started_s) * 1e3,
                state["caller"].key_name or "-",
            )

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as place:
            scope["state"]["place"] = place
            try:
                if scope["method"] != "OPTIONS":  # browsers ask without credentials whether they may ask
                    scope["state"]["caller"] = self._gate.identify(scope["path"], Headers(scope=scope))
                if _computes(scope):
                    place.enter_context(self._gate.place(scope["state"]["caller"]))
            except Dsv4Error as err:
                await error_response(err, scope["state"]["request_id"], scope["path"])(scope, receive, send)
                return
            await self._app(scope, receive, send)


def _computes(scope: Scope) -> bool:
    """Who is at a limit has to be able to cancel."""
    return scope["method"] == "POST" and not scope["path"].endswith("/cancel")


def _route(scope: Scope) -> str:
    """The route's pattern, so that metrics have a bounded number of labels."""
    return getattr(scope.get("route"), "path", "other")
