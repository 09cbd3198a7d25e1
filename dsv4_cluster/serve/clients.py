"""The router's PrefillClient and DecodeClient over Serve handles.

Tokens of a decode replica arrive on one long-lived stream per (router, replica), one message per engine step; the call
that starts a request returns as soon as the replica has taken it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable

from ray.serve.handle import DeploymentHandle

from dsv4_cluster.errors import Dsv4Error, WorkerLostError
from dsv4_cluster.protocol.handoff import DecodeRequest, KVTicket, PrefillResult
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.serve.directory import ReplicaDirectory
from dsv4_cluster.serve.errors import call_error
from dsv4_cluster.serve.request_router import open_subscription, release_everywhere
from dsv4_cluster.serve.step_stream import StepStream
from dsv4_cluster.worker.detached import DetachedTasks
from dsv4_cluster.worker.gang import abort_at

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
UNSUBSCRIBE_TIMEOUT_S = 2.0
ABANDON_TIMEOUT_S = 60.0  # an aborted call ends much earlier; a lease expires after about this time


class ServePrefillClient:
    """PrefillClient: picks a replica whose cache layout some decode replica shares."""

    def __init__(self, handle: DeploymentHandle, replicas: ReplicaDirectory, decode_replicas: ReplicaDirectory) -> None:
        self._handle = handle
        self._replicas = replicas
        self._decode_replicas = decode_replicas
        self._tasks = DetachedTasks()

    async def prefill(self, request: GenerationRequest, *, epoch: int) -> PrefillResult:
        """See PrefillClient. Raises also LayoutMismatchError, before anything is computed."""
        await self._decode_replicas.pick()
        replica_id = (await self._replicas.pick(self._decode_replicas.layout_ids())).replica_id
        with self._replicas.in_flight(replica_id):
            call = self._tasks.start(self._prefill(request, epoch, replica_id))
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:
                self._tasks.start(self._abandon(request.request_id, replica_id, call))
                raise

    async def release(self, ticket: KVTicket) -> None:
        """See PrefillClient. Every replica is told: only the publisher knows the ticket."""
        try:
            await asyncio.shield(self._tasks.start(release_everywhere(self._handle, ticket)))
        except Exception as err:
            raise call_error(err) from err

    async def _prefill(self, request: GenerationRequest, epoch: int, replica_id: str) -> PrefillResult:
        try:
            return await self._handle.prefill.remote(request, epoch=epoch, replica_id=replica_id)
        except Exception as err:
            raise _noted(call_error(err), self._replicas, replica_id) from err

    async def _abandon(self, request_id: str, replica_id: str, call: "asyncio.Task[PrefillResult]") -> None:
        """Stop a prefill nobody waits for. It may be through already: then its lease has to go."""
        await _abort_quietly(self._handle, self._replicas, request_id, replica_id)
        try:
            async with asyncio.timeout(ABANDON_TIMEOUT_S):
                result = await call
            if result.ticket is not None:
                await self.release(result.ticket)
        except (TimeoutError, Dsv4Error) as err:
            logger.debug("%s: abandoned prefill at %s: %s", request_id, replica_id, err)


class ServeDecodeClient:
    """DecodeClient: one subscription per replica, opened on first use and again after a loss."""

    def __init__(self, handle: DeploymentHandle, replicas: ReplicaDirectory, *, router_id: str) -> None:
        self._handle = handle
        self._replicas = replicas
        self._router_id = router_id
        self._streams: dict[str, StepStream] = {}
        self._subscribing = asyncio.Lock()
        self._tasks = DetachedTasks()

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[TokenChunk, None]:
        """See DecodeClient. Raises also LayoutMismatchError and OverloadedError."""
        request_id = request.request.request_id
        replica_id = (await self._replicas.pick(frozenset({request.ticket.layout_id}))).replica_id
        with self._replicas.in_flight(replica_id):
            stream = await asyncio.shield(self._tasks.start(self._subscribed(replica_id)))
            chunks = stream.open(request_id)
            is_finished = False
            try:
                await self._admit(request, replica_id)
                while not is_finished:
                    chunk = await chunks.get()
                    if isinstance(chunk, WorkerLostError):
                        raise _noted(chunk, self._replicas, replica_id)
                    is_finished = chunk.finish_reason is not None
                    yield chunk
            finally:
                stream.forget(request_id)
                if not is_finished:
                    await asyncio.shield(
                        self._tasks.start(_abort_quietly(self._handle, self._replicas, request_id, replica_id))
                    )

    def end_idle_streams(self) -> None:
        """Close subscriptions to replicas that are gone or draining; a replica drains until its last call ends."""
        for replica_id, stream in list(self._streams.items()):
            if not self._replicas.is_live(replica_id) and not stream.num_requests:
                stream.close()
                del self._streams[replica_id]

    async def close(self) -> None:
        """End every subscription; the replicas abort what is left of this router's requests."""
        streams = list(self._streams.values())
        self._streams.clear()
        # The explicit call matters: cancelling a stream from a process that ends may never reach the replica.
        await asyncio.gather(*[self._unsubscribe(stream.replica_id) for stream in streams])
        for stream in streams:
            stream.close()

    async def _subscribed(self, replica_id: str) -> StepStream:
        async with self._subscribing:
            stream = self._streams.get(replica_id)
            if stream is None or stream.has_ended:
                messages, cancel = open_subscription(self._handle, self._router_id, replica_id=replica_id)
                stream = StepStream(replica_id, messages, cancel)
                try:
                    await stream.start()
                except WorkerLostError as err:
                    raise _noted(err, self._replicas, replica_id) from err
                self._streams[replica_id] = stream
            return stream

    async def _unsubscribe(self, replica_id: str) -> None:
        try:
            async with asyncio.timeout(UNSUBSCRIBE_TIMEOUT_S):
                await self._handle.unsubscribe.remote(self._router_id, replica_id=replica_id)
        except Exception as err:
            logger.debug("unsubscribing from %s failed: %s", replica_id, call_error(err))

    async def _admit(self, request: DecodeRequest, replica_id: str) -> None:
        call = self._tasks.start(self._call_admit(request, replica_id))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            self._tasks.start(self._abort_once_admitted(request.request.request_id, replica_id, call))
            raise

    async def _call_admit(self, request: DecodeRequest, replica_id: str) -> None:
        try:
            await self._handle.admit.remote(request, router_id=self._router_id, replica_id=replica_id)
        except Exception as err:
            raise _noted(call_error(err), self._replicas, replica_id) from err

    async def _abort_once_admitted(self, request_id: str, replica_id: str, call: "asyncio.Task[None]") -> None:
        """The abort that a leaving caller sends may overtake its admission; this one cannot."""
        try:
            async with asyncio.timeout(ABANDON_TIMEOUT_S):
                await call
        except (TimeoutError, Dsv4Error) as err:
            logger.debug("%s: abandoned admission at %s: %s", request_id, replica_id, err)
        await _abort_quietly(self._handle, self._replicas, request_id, replica_id)


async def _abort_quietly(
    handle: DeploymentHandle, replicas: ReplicaDirectory, request_id: str, replica_id: str
) -> None:
    """Through Serve, or past it at the worker: Serve sends no calls to a replica that drains."""
    if replicas.is_live(replica_id) and await _is_done(handle.abort.remote(request_id, replica_id=replica_id)):
        return
    # A replica that cannot be reached either way has lost the request, or drops it with the subscription.
    if not await _is_done(abort_at(replicas.role_name, replica_id, request_id)):
        logger.debug("%s: not aborted at %s", request_id, replica_id)


async def _is_done(call: Awaitable[None]) -> bool:
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await call
    except Exception as err:
        logger.debug("an abort failed: %s", call_error(err))
        return False
    return True


def _noted(err: Dsv4Error, replicas: ReplicaDirectory, replica_id: str) -> Dsv4Error:
    """Strike a lost replica from the directory, so that the next attempt goes elsewhere or waits for a new one."""
    if isinstance(err, WorkerLostError):
        replicas.mark_lost(replica_id)
    return err
