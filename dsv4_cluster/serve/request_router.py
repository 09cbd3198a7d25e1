"""Calls to one chosen replica of a deployment. Everything that Serve calls alpha lives in this file.

Our router chooses replicas itself (it knows their load and layout); Serve's request router only has to honour that.
A pin that Serve cannot honour goes to any replica, which refuses it: see `check_pin`.
"""

import logging
from collections.abc import AsyncIterator, Callable

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.routing import ReplicaSnapshot

logger = logging.getLogger(__name__)

PIN = "replica_id"  # keyword argument of every pinned method
METRICS_TIMEOUT_S = 3.0  # scrapers give up after about ten
CALL_TIMEOUT_S = 5.0


class PinnedRequestRouter(RequestRouter):
    """Sends a call to the replica named by its `replica_id` argument.

    Not a FIFO router: with one, a reply meant for one waiting call could be given to another with a different pin.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the pinned replica, or all of them when it is gone."""
        pin = None if pending_request is None else pending_request.kwargs.get(PIN)
        pinned = [replica for replica in candidate_replicas if replica.replica_id.unique_id == pin]
        return [pinned or candidate_replicas]


def pinned_router_config() -> dict[str, str]:
    """The deployment option `request_router_config` that installs PinnedRequestRouter."""
    return {"request_router_class": f"{__name__}:{PinnedRequestRouter.__name__}"}


def own_replica_id() -> str:
    """Id of the replica this process is; the value that pins name."""
    return serve.get_replica_context().replica_id.unique_id


def check_pin(replica_id: str) -> None:
    """Raises: WorkerLostError when a call reached another replica than the one it was meant for."""
    if replica_id != own_replica_id():
        raise WorkerLostError(f"replica {replica_id} is gone; the call reached {own_replica_id()}")


async def poll_snapshots(handle: DeploymentHandle, *args: str) -> list[ReplicaSnapshot]:
    """Call `snapshot(*args)` on every replica of a deployment; replicas that fail to answer are left out.

    Raises: TimeoutError, RayServeException when the deployment has no replica.
    """
    answers = await handle.broadcast("snapshot", *args).results_async(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
    for answer in answers:
        if not isinstance(answer, ReplicaSnapshot):
            logger.debug("a replica of %s gave no snapshot: %r", handle.deployment_name, answer)
    return [answer for answer in answers if isinstance(answer, ReplicaSnapshot)]


async def poll_routers() -> list[tuple[str, str]]:
    """(router id, metrics text) of every replica of this replica's own deployment that answers in time."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    answers = await handle.broadcast("own_metrics").results_async(timeout_s=METRICS_TIMEOUT_S, return_exceptions=True)
    for answer in answers:
        if not isinstance(answer, tuple):
            logger.debug("a router gave no metrics: %r", answer)
    return [answer for answer in answers if isinstance(answer, tuple)]


async def release_everywhere(handle: DeploymentHandle, ticket: KVTicket) -> None:
    """Tell every replica to drop a lease. Raises: what a failing replica raised."""
    await handle.broadcast("release", ticket).results_async(timeout_s=CALL_TIMEOUT_S)


def open_subscription(
    handle: DeploymentHandle, router_id: str, *, replica_id: str
) -> tuple[AsyncIterator[list[TokenChunk]], Callable[[], None]]:
    """Open the long-lived call of a router at one decode replica. Returns: (its messages, how to end it)."""
    call = handle.options(stream=True).subscribe.remote(router_id, replica_id=replica_id)
    assert isinstance(call, DeploymentResponseGenerator), type(call)
    return call, call.cancel
