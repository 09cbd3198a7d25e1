"""What a prefill replica does: hand requests to its gang and clean up after callers that leave. Never computes."""

import asyncio
from typing import Self

from ray import ObjectRef
from ray.exceptions import RayError

from dsv4_cluster.errors import OverloadedError
from dsv4_cluster.protocol.handoff import KVTicket, PrefillResult
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.worker.detached import DetachedTasks
from dsv4_cluster.worker.gang import Gang
from dsv4_cluster.worker.remote_errors import typed_error
from dsv4_cluster.worker.spec import WorkerSpec

WHERE = "prefill worker"


class PrefillWorker:
    """The replica's side of its gang."""

    def __init__(self, gang: Gang, *, max_requests: int) -> None:
        self.gang = gang
        self._max_requests = max_requests
        self._num_requests = 0
        self._cleanups = DetachedTasks()

    @classmethod
    async def create(cls, spec: WorkerSpec, *, replica_id: str) -> Self:
        """Start the gang. Raises: CheckpointError, ConfigError, WorkerLostError."""
        return cls(await Gang.create(spec, replica_id=replica_id), max_requests=spec.role.max_ongoing_requests)

    async def prefill(self, request: GenerationRequest, *, epoch: int) -> PrefillResult:
        """Compute the prompt. Cancelling the call aborts the request and drops a lease nobody would fetch.

        Raises: InvalidRequestError, OverloadedError, NonFiniteLogitsError, WorkerLostError.
        """
        if self._num_requests >= self._max_requests:
            raise OverloadedError(f"prefill.max_ongoing_requests is {self._max_requests}, all of them in use")
        self._num_requests += 1
        call: ObjectRef[PrefillResult] = self.gang.leader.prefill.remote(request, epoch)
        try:
            return await call
        except asyncio.CancelledError:
            self._cleanups.start(self._abandon(request.request_id, call))
            raise
        except Exception as err:
            raise typed_error(err, where=WHERE) from err
        finally:
            self._num_requests -= 1

    async def abort(self, request_id: str) -> None:
        """Stop computing a request and free its pages; unknown ids are ignored. Raises: WorkerLostError."""
        try:
            await self.gang.leader.abort.remote(request_id)
        except Exception as err:
            raise typed_error(err, where=WHERE) from err

    async def release(self, ticket: KVTicket) -> None:
        """Drop a lease; unknown tickets are ignored. Raises: WorkerLostError."""
        try:
            await self.gang.leader.release.remote(ticket)
        except Exception as err:
            raise typed_error(err, where=WHERE) from err

    async def close(self) -> None:
        """Cancel what is left and end the gang."""
        self._cleanups.cancel()
        self.gang.kill()

    async def _abandon(self, request_id: str, call: "ObjectRef[PrefillResult]") -> None:
        try:
            await self.gang.leader.abort.remote(request_id)
            result = await call
        except RayError:
            return  # the request ended without a result, which is what the caller wanted
        if result.ticket is not None:
            await self.release(result.ticket)
