"""What a decode replica does: admit requests, pump its gang's steps to the routers, abort. Never computes."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Self

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.errors import OverloadedError, WorkerLostError
from dsv4_cluster.protocol.handoff import DecodeRequest
from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.worker.detached import DetachedTasks
from dsv4_cluster.worker.gang import Gang
from dsv4_cluster.worker.remote_errors import typed_error
from dsv4_cluster.worker.spec import WorkerSpec
from dsv4_cluster.worker.stream import Message, StepFanout

logger = logging.getLogger(__name__)
WHERE = "decode worker"


class DecodeWorker:
    """The replica's side of its gang."""

    def __init__(self, gang: Gang, *, max_requests: int) -> None:
        self.gang = gang
        self._max_requests = max_requests
        self._fanout = StepFanout(self._abort_soon, MonotonicClock())
        self._tasks = DetachedTasks()
        self._tasks.start(self._pump())

    @classmethod
    async def create(cls, spec: WorkerSpec, *, replica_id: str) -> Self:
        """Start the gang and the pump. Raises: CheckpointError, ConfigError, WorkerLostError."""
        return cls(await Gang.create(spec, replica_id=replica_id), max_requests=spec.role.max_ongoing_requests)

    async def admit(self, request: DecodeRequest, *, router_id: str) -> None:
        """Fetch the cache and start decoding; tokens go to the router's subscription. Cancelling aborts.

        Raises: KVTransferError and its kinds, OverloadedError, WorkerLostError.
        """
        if self._fanout.num_requests >= self._max_requests:
            raise OverloadedError(f"decode.max_ongoing_requests is {self._max_requests}, all of them in use")
        request_id = request.request.request_id
        self._fanout.register(request_id, router_id)
        try:
            await self.gang.leader.decode.remote(request)
        except asyncio.CancelledError:
            self._fanout.forget(request_id)
            self._abort_soon(request_id)
            raise
        except Exception as err:
            self._fanout.forget(request_id)
            raise typed_error(err, where=WHERE) from err
        if not self._fanout.wants(request_id):
            # The router went, or aborted, while the engine took the sequence: that abort may have come too early.
            self._abort_soon(request_id)

    async def abort(self, request_id: str) -> None:
        """Forget a request and free its pages; unknown ids are ignored. Raises: WorkerLostError."""
        self._fanout.forget(request_id)
        try:
            await self.gang.leader.abort.remote(request_id)
        except Exception as err:
            raise typed_error(err, where=WHERE) from err

    def subscribe(self, router_id: str) -> AsyncGenerator[Message, None]:
        """Steps for one router, see StepFanout.subscribe."""
        return self._fanout.subscribe(router_id)

    def unsubscribe(self, router_id: str) -> None:
        """End a router's subscription; its requests are aborted."""
        self._fanout.unsubscribe(router_id)

    async def snapshot(self, router_id: str) -> ReplicaSnapshot:
        """Load of the replica. The question is also the router's sign of life. Raises: WorkerLostError."""
        self._fanout.hear(router_id)
        return await self.gang.snapshot()

    async def close(self) -> None:
        """End every subscription and the gang."""
        self._fanout.fail(WorkerLostError("the decode replica shuts down"))
        self._tasks.cancel()
        self.gang.kill()

    async def _pump(self) -> None:
        """Hand every step of the gang to the fan-out; a dead or failed gang ends all subscriptions at once."""
        try:
            async for step in self.gang.leader.steps.remote():
                self._fanout.publish(await step)
        except Exception as err:
            lost = WorkerLostError(f"decode gang lost: {typed_error(err, where=WHERE).message}")
            logger.warning("%s", lost)
            self._fanout.fail(lost)

    def _abort_soon(self, request_id: str) -> None:
        self._tasks.start(self._abort_quietly(request_id))

    async def _abort_quietly(self, request_id: str) -> None:
        try:
            await self.abort(request_id)
        except WorkerLostError:
            logger.debug("%s: not aborted, its worker is gone", request_id)
