"""The actor of one rank: it owns the engine loop and the KV transport and answers in asyncio while steps run.

torch, the engine and the transport are imported when the actor starts, not when this module is: the Serve replica that
creates the actor imports this module too, and must stay small.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import ray

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.errors import InvalidRequestError, OverloadedError, PromptTooLongError, WorkerLostError
from dsv4_cluster.protocol.handoff import DecodeRequest, KVTicket, PrefillResult
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.stats import EngineStats
from dsv4_cluster.worker.spec import Beat, WorkerAudit, WorkerInfo, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsv4_cluster.engine.core import EngineCore, SequenceExport
    from dsv4_cluster.kv.snapshot import LiveSegment
    from dsv4_cluster.transfer.base import KVTransport
    from dsv4_cluster.worker.loop import EngineLoop, LoopCallbacks

logger = logging.getLogger(__name__)
T = TypeVar("T")

ADMIT_WAIT_S = 30.0  # how long a fetched sequence may wait for free pages before the router is told to go elsewhere
STOP_WAIT_S = 5.0


class EngineWorker:
    """One rank. All methods run on the actor's event loop and never block it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._clock = MonotonicClock()
        self._prefills: dict[str, asyncio.Future[TokenChunk]] = {}
        self._steps: asyncio.Queue[list[TokenChunk] | WorkerLostError] = asyncio.Queue()
        self._pages_may_be_free = asyncio.Event()
        self._admission = asyncio.Lock()  # sequences that wait for pages are admitted in order

    async def start(self) -> WorkerInfo:
        """Load the checkpoint and begin stepping. Raises: CheckpointError, ConfigError."""
        from dsv4_cluster.worker.runtime import build_runtime

        self._asyncio_loop = asyncio.get_running_loop()
        runtime = await asyncio.to_thread(build_runtime, self._spec, self._loop_callbacks())
        self._engine: EngineLoop = runtime.loop
        self._transport: KVTransport = runtime.transport
        self._layout_id = runtime.layout_id
        self._engine.start()
        return WorkerInfo(
            rank=self._spec.rank,
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            layout_id=runtime.layout_id,
            max_model_len=runtime.max_model_len,
        )

    async def beat(self) -> Beat:
        """Answer at once, also during a step. Raises: WorkerLostError when the engine failed or a step hangs."""
        if self._engine.failure is not None:
            raise WorkerLostError(f"{self._name} failed: {self._engine.failure}")
        busy_s = self._engine.busy_s()
        if busy_s > self._spec.step_limit_s:
            limit_s = self._spec.step_limit_s
            raise WorkerLostError(f"{self._name}: a step runs for {busy_s:.0f} s, limit {limit_s:.0f} s")
        return Beat(rank=self._spec.rank, busy_s=busy_s, last_step_age_s=self._engine.last_step_age_s())

    async def stats(self) -> EngineStats:
        """Counters after the last step; does not wait for the running one."""
        return self._engine.stats

    async def audit(self) -> WorkerAudit:
        """Check the engine's accounting between two steps and count what is held.

        Raises: AssertionError with the numbers when pages or slots are not accounted for.
        """
        stats = await self._in_engine(_checked_stats)
        return WorkerAudit(rank=self._spec.rank, stats=stats, num_leases=self._transport.num_leases)

    async def prefill(self, request: GenerationRequest, epoch: int) -> PrefillResult:
        """Compute prompt and first token, publish the live cache and free its pages.

        An aborted request ends with a chunk whose finish_reason is ABORT and no ticket.
        Raises: InvalidRequestError, PromptTooLongError when the prompt's cache could not be handed over,
            OverloadedError, NonFiniteLogitsError, WorkerLostError.
        """
        request_id = request.request_id
        received_s = self._clock.now_s()
        if request_id in self._prefills:
            raise InvalidRequestError(f"request id {request_id!r} is already running")
        # Registered before the engine knows the request: its first token may be on its way when `add` returns.
        self._prefills[request_id] = first_token = self._asyncio_loop.create_future()
        try:
            await self._in_engine(lambda core: self._add(core, request, received_s))
            chunk = await first_token
            if chunk.error is not None:
                raise chunk.error
            ticket = None if chunk.finish_reason is not None else await self._publish(request_id, epoch)
        except BaseException:
            # Also on cancellation: nobody waits for the result, so the pages must not stay.
            self._abort_in_engine(request_id)
            raise
        finally:
            self._prefills.pop(request_id, None)
        return PrefillResult(
            request_id=request_id,
            first_chunk=chunk,
            ticket=ticket,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=chunk.num_cached_tokens,
        )

    async def decode(self, request: DecodeRequest) -> None:
        """Fetch the cache and start decoding; the tokens leave through `steps`. The lease is released.

        Raises: KVTransferError and its kinds, OverloadedError when no pages became free in time, WorkerLostError.
        """
        ticket = request.ticket
        request_id = request.request.request_id
        received_s = self._clock.now_s()
        segments = await asyncio.to_thread(
            self._transport.fetch, ticket, request_id=request_id, epoch=request.epoch, layout_id=self._layout_id
        )
        await self.release(ticket)
        try:
            async with asyncio.timeout(ADMIT_WAIT_S), self._admission:
                await self._admit(request, segments, received_s)
        except BaseException as err:
            # Also on timeout and cancellation: the engine may have taken the sequence meanwhile.
            self._abort_in_engine(request_id)
            if isinstance(err, TimeoutError):
                raise OverloadedError(f"{request_id}: no free cache pages within {ADMIT_WAIT_S:.0f} s") from err
            raise

    async def abort(self, request_id: str) -> bool:
        """Forget a request in any phase and free its pages. Returns: False when it is not here."""
        is_known = await self._in_engine(lambda core: core.abort(request_id))
        self._pages_may_be_free.set()
        waiting = self._prefills.pop(request_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(TokenChunk(request_id=request_id, finish_reason=FinishReason.ABORT))
        return is_known

    async def release(self, ticket: KVTicket) -> None:
        """Drop a lease; unknown tickets are ignored."""
        await asyncio.to_thread(self._transport.release, ticket)

    async def steps(self) -> AsyncIterator[list[TokenChunk]]:
        """Yield one list per engine step that produced tokens for decoding sequences. One consumer.

        Raises: WorkerLostError when the engine fails.
        """
        while True:
            item = await self._steps.get()
            if isinstance(item, WorkerLostError):
                raise item
            yield item

    async def stop(self) -> None:
        """End the engine thread and close the transport."""
        await asyncio.to_thread(self._engine.stop, STOP_WAIT_S)
        await asyncio.to_thread(self._transport.close)

    @property
    def _name(self) -> str:
        return f"{self._spec.role_name} worker rank {self._spec.rank} (pid {os.getpid()})"

    async def _in_engine(self, run: "Callable[[EngineCore], T]") -> T:
        return await asyncio.wrap_future(self._engine.submit(run))

    def _add(self, core: "EngineCore", request: GenerationRequest, received_s: float) -> None:
        """Refuse a prompt that could be computed and not published. What is left of the deadline counts from here."""
        num_tokens = len(request.prompt_token_ids)
        num_bytes = sum(shape.num_bytes for shape in core.live_segment_shapes(num_tokens))
        limit = self._spec.transfer.max_staged_bytes
        if request.sampling.max_tokens > 1 and num_bytes > limit:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, whose cache takes {num_bytes} bytes to hand over; "
                f"transfer.max_staged_bytes is {limit}"
            )
        core.add(request.after(self._clock.now_s() - received_s), hold_after_prefill=True)

    def _abort_in_engine(self, request_id: str) -> None:
        freed = self._engine.submit(lambda core: core.abort(request_id))
        freed.add_done_callback(lambda _: self._asyncio_loop.call_soon_threadsafe(self._pages_may_be_free.set))

    async def _publish(self, request_id: str, epoch: int) -> KVTicket:
        export = await self._in_engine(lambda core: _export_and_free(core, request_id))
        publishing = asyncio.ensure_future(
            asyncio.to_thread(
                self._transport.publish,
                request_id=request_id,
                epoch=epoch,
                layout_id=self._layout_id,
                num_tokens=export.num_tokens,
                segments=export.segments,
            )
        )
        try:
            return await asyncio.shield(publishing)
        except asyncio.CancelledError:
            # The thread goes on; nobody will learn its ticket.
            publishing.add_done_callback(self._drop_lease)
            raise

    def _drop_lease(self, publishing: "asyncio.Future[KVTicket]") -> None:
        if not publishing.cancelled() and publishing.exception() is None:
            self._asyncio_loop.run_in_executor(None, self._transport.release, publishing.result())

    async def _admit(self, request: DecodeRequest, segments: "Sequence[LiveSegment]", received_s: float) -> None:
        """The time that fetching and waiting took counts against the deadline."""

        def import_into(core: "EngineCore") -> bool:
            left = request.request.after(self._clock.now_s() - received_s)
            return core.import_sequence(left, request.first_token_id, segments)

        while True:
            self._pages_may_be_free.clear()
            if await self._in_engine(import_into):
                return
            await self._pages_may_be_free.wait()

    def _loop_callbacks(self) -> "LoopCallbacks":
        """Callbacks for the engine thread; each hops to the event loop."""
        from dsv4_cluster.worker.loop import LoopCallbacks

        hop = self._asyncio_loop.call_soon_threadsafe
        return LoopCallbacks(
            on_chunks=lambda chunks: hop(self._take_step, chunks),
            on_step=lambda: hop(self._pages_may_be_free.set),
            on_failure=lambda err: hop(self._fail, err),
            housekeeping=lambda: self._transport.sweep(),
        )

    def _take_step(self, chunks: Sequence[TokenChunk]) -> None:
        decoded = []
        for chunk in chunks:
            waiting = self._prefills.pop(chunk.request_id, None)
            if waiting is None:
                decoded.append(chunk)
            elif not waiting.done():
                waiting.set_result(chunk)
        if decoded:
            self._steps.put_nowait(decoded)

    def _fail(self, err: BaseException) -> None:
        lost = WorkerLostError(f"{self._name} failed: {type(err).__name__}: {err}")
        for waiting in self._prefills.values():
            if not waiting.done():
                waiting.set_exception(lost)
        self._prefills.clear()
        self._steps.put_nowait(lost)


def _export_and_free(core: "EngineCore", request_id: str) -> "SequenceExport":
    """Copy a held sequence out and give its pages back, in one command: no held sequence is ever left behind."""
    export = core.export_sequence(request_id)
    core.abort(request_id)
    return export


def _checked_stats(core: "EngineCore") -> EngineStats:
    core.check()
    return core.stats()
