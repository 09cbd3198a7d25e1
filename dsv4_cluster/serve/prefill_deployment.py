"""The prefill deployment: Serve's face of a PrefillWorker."""

from dsv4_cluster.protocol.handoff import KVTicket, PrefillResult
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.serve.environment import warn_of_missing_settings
from dsv4_cluster.serve.process_facts import ProcessFacts, process_facts
from dsv4_cluster.serve.request_router import check_pin, own_replica_id
from dsv4_cluster.worker.prefill_worker import PrefillWorker
from dsv4_cluster.worker.spec import WorkerAudit, WorkerInfo, WorkerSpec


class PrefillDeployment:
    """One prefill replica. `replica_id` arguments name the replica a call is meant for."""

    async def __init__(self, spec: WorkerSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        warn_of_missing_settings()
        self._worker = await PrefillWorker.create(spec, replica_id=own_replica_id())

    async def prefill(self, request: GenerationRequest, *, epoch: int, replica_id: str) -> PrefillResult:
        """See PrefillWorker.prefill. Raises also WorkerLostError when the call is for another replica."""
        check_pin(replica_id)
        return await self._worker.prefill(request, epoch=epoch)

    async def abort(self, request_id: str, *, replica_id: str) -> None:
        """See PrefillWorker.abort."""
        check_pin(replica_id)
        await self._worker.abort(request_id)

    async def release(self, ticket: KVTicket) -> None:
        """See PrefillWorker.release."""
        await self._worker.release(ticket)

    async def snapshot(self) -> ReplicaSnapshot:
        """Load of this replica. Raises: WorkerLostError."""
        return await self._worker.gang.snapshot()

    async def worker_infos(self) -> tuple[WorkerInfo, ...]:
        """Process and node of every rank, for people who debug."""
        return self._worker.gang.infos

    async def process_facts(self) -> ProcessFacts:
        """See serve/process_facts.py; about this replica, not its workers."""
        return process_facts()

    async def audit(self) -> list[WorkerAudit]:
        """See Gang.audit."""
        return await self._worker.gang.audit()

    async def check_health(self) -> None:
        """Ask every worker. Raises what Serve takes as unhealthy; a dead worker counts at once."""
        await self._worker.gang.beats()

    async def __del__(self) -> None:
        await self._worker.close()
