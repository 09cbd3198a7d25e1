"""Fan-out of engine steps: one message per step and subscribed router, however many sequences run.

A subscription is a long-lived call of one router. When it ends, for whatever reason, that router's requests are
aborted: nobody would read their tokens.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence

from dsv4_cluster.clock import Clock
from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.output import TokenChunk

Message = list[TokenChunk]

ROUTER_SILENCE_S = 15.0  # routers speak about once a second


class StepFanout:
    """Which router wants which request, and one queue per router."""

    def __init__(self, abort: Callable[[str], None], clock: Clock) -> None:
        """abort: called with a request id when the router that wanted it is gone; must not block."""
        self._abort = abort
        self._clock = clock
        self._heard_at_s: dict[str, float] = {}  # of routers, subscribed or not
        self._router_of: dict[str, str] = {}
        self._queues: dict[str, asyncio.Queue[Message | WorkerLostError]] = {}
        self._lost: WorkerLostError | None = None

    def register(self, request_id: str, router_id: str) -> None:
        """Send the tokens of a request to a router. Raises: WorkerLostError when that router is not subscribed."""
        if self._lost is not None:
            raise self._lost
        if router_id not in self._queues:
            raise WorkerLostError(f"{request_id}: router {router_id} is not subscribed to this replica")
        self._router_of[request_id] = router_id

    def forget(self, request_id: str) -> None:
        """Drop a request; its late tokens go nowhere."""
        self._router_of.pop(request_id, None)

    def wants(self, request_id: str) -> bool:
        """True while a router waits for tokens of the request."""
        return request_id in self._router_of

    def publish(self, chunks: Sequence[TokenChunk]) -> None:
        """Queue the chunks of one step: one message for every router that has a sequence in it."""
        messages: defaultdict[str, Message] = defaultdict(list)
        for chunk in chunks:
            router_id = self._router_of.get(chunk.request_id)
            if router_id is None:
                continue
            messages[router_id].append(chunk)
            if chunk.finish_reason is not None:
                del self._router_of[chunk.request_id]
        for router_id, message in messages.items():
            self._queues[router_id].put_nowait(message)

    async def subscribe(self, router_id: str) -> AsyncGenerator[Message, None]:
        """Yield an empty message at once, then one message per step; messages that piled up are joined.

        A second subscription of the same router replaces the first. Raises: WorkerLostError when the gang is lost.
        """
        if self._lost is not None:
            raise self._lost
        self._end(router_id, WorkerLostError(f"router {router_id} subscribed again"))
        queue: asyncio.Queue[Message | WorkerLostError] = asyncio.Queue()
        self._queues[router_id] = queue
        try:
            yield []
            while True:
                yield await _next_message(queue)
        finally:
            if self._queues.get(router_id) is queue:
                self._drop(router_id)

    def hear(self, router_id: str) -> None:
        """Note a sign of life of a router, and end the subscriptions of routers that are gone.

        A router is gone when it has been silent for ROUTER_SILENCE_S, judged only while another one speaks: silence of
        all means that this replica is draining, where the last tokens must still go out. Not every Serve transport
        ends the call of a caller that died.
        """
        now_s = self._clock.now_s()
        self._heard_at_s[router_id] = now_s
        for silent in [rid for rid, at_s in self._heard_at_s.items() if now_s - at_s > ROUTER_SILENCE_S]:
            del self._heard_at_s[silent]
            self.unsubscribe(silent)

    def unsubscribe(self, router_id: str) -> None:
        """End a router's subscription, if it has one, and abort its requests."""
        self._end(router_id, WorkerLostError(f"router {router_id} is gone"))

    def fail(self, lost: WorkerLostError) -> None:
        """End every subscription with an error, for good."""
        self._lost = lost
        for router_id in list(self._queues):
            self._end(router_id, lost)

    @property
    def num_requests(self) -> int:
        """Requests whose tokens somebody waits for."""
        return len(self._router_of)

    def _end(self, router_id: str, reason: WorkerLostError) -> None:
        queue = self._queues.get(router_id)
        if queue is not None:
            self._drop(router_id)
            queue.put_nowait(reason)

    def _drop(self, router_id: str) -> None:
        del self._queues[router_id]
        for request_id in [rid for rid, owner in self._router_of.items() if owner == router_id]:
            del self._router_of[request_id]
            self._abort(request_id)


async def _next_message(queue: "asyncio.Queue[Message | WorkerLostError]") -> Message:
    """Wait for one message and take along what else is there. Raises: the WorkerLostError that ends the queue."""
    message: Message = []
    item = await queue.get()
    while not isinstance(item, WorkerLostError):
        message.extend(item)
        if queue.empty():
            return message
        item = queue.get_nowait()
    if message:
        queue.put_nowait(item)  # first deliver what came before the end
        return message
    raise item
