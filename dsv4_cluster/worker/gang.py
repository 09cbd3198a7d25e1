"""The worker actors of one Serve replica: created together, healthy together, gone together."""

import asyncio
import dataclasses
from typing import Self

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.worker.engine_worker import EngineWorker
from dsv4_cluster.worker.remote_errors import typed_error
from dsv4_cluster.worker.spec import Beat, WorkerAudit, WorkerInfo, WorkerSpec

BEAT_TIMEOUT_S = 5.0  # a worker's event loop answers in milliseconds; seconds of silence mean it is stuck
SPARE_CALLS = 64  # actor calls besides the requests themselves: beats, stats, aborts, the step stream


class Gang:
    """All ranks of one replica. They are owned by the replica's process and die with it."""

    def __init__(self, role_name: str, replica_id: str, workers: list[ActorHandle], infos: list[WorkerInfo]) -> None:
        self._role_name = role_name
        self._replica_id = replica_id
        self._workers = workers
        self.infos = tuple(infos)

    @classmethod
    async def create(cls, spec: WorkerSpec, *, replica_id: str) -> Self:
        """Start every rank in the replica's placement group and wait until all have loaded.

        The group's bundle 0 is the replica's own, bundle 1 + rank is the worker's.
        Raises: CheckpointError, ConfigError, WorkerLostError.
        """
        workers = [_create_worker(spec, rank, replica_id=replica_id) for rank in range(spec.role.parallel.tp_size)]
        try:
            infos: list[WorkerInfo] = await asyncio.gather(*[worker.start.remote() for worker in workers])
        except Exception as err:
            _kill(workers)
            raise typed_error(err, where=f"{spec.role_name} worker") from err
        return cls(spec.role_name, replica_id, workers, infos)

    @property
    def leader(self) -> ActorHandle:
        """Rank 0, which takes requests and hands out tokens."""
        return self._workers[0]

    @property
    def layout_id(self) -> str:
        """Cache layout of every rank."""
        return self.infos[0].layout_id

    async def beats(self) -> list[Beat]:
        """Ask every rank for a sign of life.

        Raises: RayActorError when one died (Serve then replaces the replica at once), TimeoutError, WorkerLostError.
        """
        async with asyncio.timeout(BEAT_TIMEOUT_S):
            return await asyncio.gather(*[worker.beat.remote() for worker in self._workers])

    async def snapshot(self) -> ReplicaSnapshot:
        """Load of the replica, as its leader reports it without waiting for the running step.

        Raises: WorkerLostError.
        """
        try:
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                stats = await self.leader.stats.remote()
        except Exception as err:
            raise typed_error(err, where=f"{self._role_name} worker") from err
        return ReplicaSnapshot(
            replica_id=self._replica_id,
            role=self._role_name,
            node_id=self.infos[0].node_id,
            layout_id=self.layout_id,
            stats=stats,
        )

    async def audit(self) -> list[WorkerAudit]:
        """Check the accounting of every rank. Raises: AssertionError with the numbers, WorkerLostError."""
        return await asyncio.gather(*[worker.audit.remote() for worker in self._workers])

    def kill(self) -> None:
        """End every rank at once."""
        _kill(self._workers)


def worker_name(role_name: str, replica_id: str, rank: int) -> str:
    """Name of a rank's actor; the processes of one application share a namespace."""
    return f"dsv4::{role_name}::{replica_id}::tp{rank}"


async def abort_at(role_name: str, replica_id: str, request_id: str) -> None:
    """Abort a request at the leader of a replica that calls no longer reach. Raises: WorkerLostError."""
    try:
        leader = await asyncio.to_thread(ray.get_actor, worker_name(role_name, replica_id, 0))
        await leader.abort.remote(request_id)
    except ValueError as err:  # no actor of this name
        raise WorkerLostError(f"{role_name} worker of {replica_id} is gone") from err
    except Exception as err:
        raise typed_error(err, where=f"{role_name} worker") from err


def _create_worker(spec: WorkerSpec, rank: int, *, replica_id: str) -> ActorHandle:
    group = get_current_placement_group()
    placement = {} if group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, 1 + rank)}
    handle = (
        ray.remote(EngineWorker)
        .options(
            name=worker_name(spec.role_name, replica_id, rank),
            num_cpus=spec.role.worker_num_cpus,
            num_gpus=spec.role.worker_num_gpus,
            max_restarts=0,  # a rank never comes back alone: the replica starts a new gang
            max_concurrency=spec.role.max_ongoing_requests + SPARE_CALLS,
            **placement,
        )
        .remote(dataclasses.replace(spec, rank=rank))
    )
    assert isinstance(handle, ActorHandle), type(handle)
    return handle


def _kill(workers: list[ActorHandle]) -> None:
    for worker in workers:
        ray.kill(worker)
