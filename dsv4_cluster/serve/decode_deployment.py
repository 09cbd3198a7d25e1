"""The decode deployment: Serve's face of a DecodeWorker."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from dsv4_cluster.protocol.handoff import DecodeRequest
from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.serve.environment import warn_of_missing_settings
from dsv4_cluster.serve.process_facts import ProcessFacts, process_facts
from dsv4_cluster.serve.request_router import check_pin, own_replica_id
from dsv4_cluster.worker.decode_worker import DecodeWorker
from dsv4_cluster.worker.spec import WorkerAudit, WorkerInfo, WorkerSpec
from dsv4_cluster.worker.stream import Message


class DecodeDeployment:
    """One decode replica. `replica_id` arguments name the replica a call is meant for."""

    async def __init__(self, spec: WorkerSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        warn_of_missing_settings()
        self._worker = await DecodeWorker.create(spec, replica_id=own_replica_id())

    async def subscribe(self, router_id: str, *, replica_id: str) -> AsyncIterator[Message]:
        """Yield an empty message, then one per engine step with tokens of the router's requests.

        Raises: WorkerLostError.
        """
        check_pin(replica_id)
        async with aclosing(self._worker.subscribe(router_id)) as messages:
            async for message in messages:
                yield message

    async def admit(self, request: DecodeRequest, *, router_id: str, replica_id: str) -> None:
        """See DecodeWorker.admit. Raises also WorkerLostError when the call is for another replica."""
        check_pin(replica_id)
        await self._worker.admit(request, router_id=router_id)

    async def abort(self, request_id: str, *, replica_id: str) -> None:
        """See DecodeWorker.abort."""
        check_pin(replica_id)
        await self._worker.abort(request_id)

    async def unsubscribe(self, router_id: str, *, replica_id: str) -> None:
        """See DecodeWorker.unsubscribe."""
        check_pin(replica_id)
        self._worker.unsubscribe(router_id)

    async def snapshot(self, router_id: str) -> ReplicaSnapshot:
        """See DecodeWorker.snapshot."""
        return await self._worker.snapshot(router_id)

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
