"""The router's end of one subscription: one reader per decode replica, one queue per request."""

import asyncio
from collections.abc import AsyncIterator, Callable

from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.serve.errors import call_error

HELLO_TIMEOUT_S = 10.0  # a replica confirms a subscription at once


class StepStream:
    """Reads the messages of one replica and hands each chunk to the request it belongs to."""

    def __init__(self, replica_id: str, messages: AsyncIterator[list[TokenChunk]], cancel: Callable[[], None]) -> None:
        """messages: one list per engine step, the first one empty; cancel: ends the call behind them."""
        self.replica_id = replica_id
        self._messages = messages
        self._cancel = cancel
        self._queues: dict[str, asyncio.Queue[TokenChunk | WorkerLostError]] = {}
        self._ended: WorkerLostError | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the replica's confirmation, then read on in the background. Raises: WorkerLostError."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await anext(self._messages)
        except (Exception, asyncio.CancelledError) as err:
            self._cancel()
            if isinstance(err, asyncio.CancelledError):
                raise
            raise WorkerLostError(f"cannot subscribe to {self.replica_id}: {call_error(err).message}") from err
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def open(self, request_id: str) -> "asyncio.Queue[TokenChunk | WorkerLostError]":
        """Return the queue of a request's chunks; a WorkerLostError in it means that no more will come."""
        queue: asyncio.Queue[TokenChunk | WorkerLostError] = asyncio.Queue()
        self._queues[request_id] = queue
        if self._ended is not None:
            queue.put_nowait(self._ended)
        return queue

    def forget(self, request_id: str) -> None:
        """Drop a request; its late chunks go nowhere."""
        self._queues.pop(request_id, None)

    @property
    def has_ended(self) -> bool:
        """True when the subscription is over and a new one is needed."""
        return self._ended is not None

    @property
    def num_requests(self) -> int:
        """Requests whose chunks somebody waits for."""
        return len(self._queues)

    def close(self) -> None:
        """End the subscription."""
        self._cancel()
        if self._reader is not None:
            self._reader.cancel()
        self._end(WorkerLostError(f"the subscription to {self.replica_id} was closed"))

    async def _read(self) -> None:
        try:
            async for message in self._messages:
                for chunk in message:
                    queue = self._queues.get(chunk.request_id)
                    if queue is not None:
                        queue.put_nowait(chunk)
        except Exception as err:
            self._end(WorkerLostError(f"lost {self.replica_id}: {call_error(err).message}"))
        finally:
            # Also when Serve cancels the call: nobody may wait on a reader that is gone.
            self._end(WorkerLostError(f"the subscription to {self.replica_id} ended"))

    def _end(self, reason: WorkerLostError) -> None:
        if self._ended is None:
            self._ended = reason
            for queue in self._queues.values():
                queue.put_nowait(reason)
