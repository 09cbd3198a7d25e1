"""The story of one request: admission, prefill, first token, handoff, decode, end.

Failure and cancellation each take one path. A retryable error before the first decoded token means prefill again with
the next epoch: sampling noise is a function of (seed, position), so the recomputed first token is the one the client
has, and it is not sent twice. Every replica is told how much time is left: the request's own deadline or the router's
limit, whichever comes first. Closing the stream cancels the call in charge, which aborts the request at its replica,
and drops the lease unless decode has taken it over.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import DeadlineExceededError, Dsv4Error, KVTransferError, OverloadedError, WorkerLostError
from dsv4_cluster.protocol.handoff import DecodeRequest, KVTicket, PrefillResult
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.services import DecodeClient, PrefillClient
from dsv4_cluster.router.admission import Admission

logger = logging.getLogger(__name__)

RETRY_BACKOFF_S = 0.05  # doubles per attempt; long enough for a replica set to notice a dead member
RELEASE_TIMEOUT_S = 5.0  # a release that takes longer is left to the lease's expiry
CLOSE_TIMEOUT_S = 5.0  # likewise for telling a decode replica to stop
READY_TIMEOUT_S = 5.0


class Orchestrator:
    """The GenerationService of a router replica. Belongs to one event loop."""

    def __init__(
        self,
        prefill: PrefillClient,
        decode: DecodeClient,
        config: RouterConfig,
        *,
        model_names: Sequence[str],
        max_model_len: int,
        probe: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        """max_model_len: prompt + answer in tokens. probe: what the replicas lack to serve requests, if anything."""
        self._prefill = prefill
        self._decode = decode
        self._config = config
        self._model_names = tuple(model_names)
        self._probe = probe
        self._cleanups: set[asyncio.Task[None]] = set()
        self.admission = Admission(max_in_flight=config.max_ongoing_requests, max_model_len=max_model_len)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream every token of the answer; the last chunk has a finish reason. Closing early aborts the request.

        Raises: InvalidRequestError, OverloadedError, DeadlineExceededError, and what the replicas raise once no
        attempt is left.
        """
        self.admission.check(request)
        with self.admission.slot():
            request = request.within(self._config.request_timeout_s)
            started_s = asyncio.get_running_loop().time()
            deadline_s = started_s + (request.deadline_s or 0.0)
            first_chunk: TokenChunk | None = None
            for epoch in range(self._config.max_attempts):
                ticket: KVTicket | None = None  # of this attempt, as long as nobody else is in charge of it
                stream: AsyncGenerator[TokenChunk, None] | None = None
                is_over = False
                try:
                    result = await self._prefill_once(_from_now(request, started_s), epoch, deadline_s)
                    ticket = result.ticket
                    result.first_chunk.raise_if_failed()
                    if first_chunk is None:
                        first_chunk = result.first_chunk
                        yield first_chunk
                    else:
                        _check_same_first_token(first_chunk, result.first_chunk)
                    if ticket is None or first_chunk.finish_reason is not None:
                        return
                    left = _from_now(request, started_s)
                    stream = self._decode.decode(_decode_request(left, first_chunk, epoch, ticket))
                    chunk = await _next_chunk(stream, deadline_s)
                    ticket = None
                    while chunk.finish_reason is None:
                        yield chunk
                        chunk = await _next_chunk(stream, deadline_s)
                    is_over = True
                    yield chunk
                    return
                except Dsv4Error as err:
                    is_mid_stream = stream is not None and ticket is None
                    if is_mid_stream or not self._may_retry(err, epoch, is_first_try=first_chunk is None):
                        raise
                    logger.warning("%s: attempt %d failed, prefill again: %s", request.request_id, epoch, err)
                finally:
                    if ticket is not None:
                        self._release_soon(ticket)
                    if stream is not None:
                        await _close(stream, request.request_id, is_over=is_over)
                await _back_off(epoch, deadline_s)

    def model_names(self) -> Sequence[str]:
        """Served model names, the canonical one first."""
        return self._model_names

    async def unready_reasons(self) -> Sequence[str]:
        """Why a request would not be accepted now, one sentence each; empty when it would."""
        reasons = [] if self.admission.has_room else [self.admission.fullness()]
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                reasons += await self._probe()
        except TimeoutError:
            reasons.append(f"the replicas were not known within {READY_TIMEOUT_S:.0f} s")
        except Dsv4Error as err:
            reasons.append(err.message)
        return reasons

    async def close(self) -> None:
        """Wait for releases that are still under way (each is bounded by its timeout)."""
        await asyncio.gather(*self._cleanups)

    async def _prefill_once(self, request: GenerationRequest, epoch: int, deadline_s: float) -> PrefillResult:
        async with _deadline(deadline_s, "prefill"):
            return await self._prefill.prefill(request, epoch=epoch)

    def _may_retry(self, err: Dsv4Error, epoch: int, *, is_first_try: bool) -> bool:
        """Before the first token a full queue is the client's to know; after it the handoff may be tried again."""
        kinds = (
            (KVTransferError, WorkerLostError) if is_first_try else (KVTransferError, WorkerLostError, OverloadedError)
        )
        return err.retryable and isinstance(err, kinds) and epoch + 1 < self._config.max_attempts

    def _release_soon(self, ticket: KVTicket) -> None:
        """Release on a task of its own, so that neither a retry nor a leaving client waits for it."""
        task = asyncio.get_running_loop().create_task(self._release(ticket))
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)

    async def _release(self, ticket: KVTicket) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._prefill.release(ticket)
        except (TimeoutError, Dsv4Error) as err:
            logger.warning(
                "%s: release of %s failed, its lease will expire: %r", ticket.request_id, ticket.ticket_id, err
            )


def _from_now(request: GenerationRequest, started_s: float) -> GenerationRequest:
    """The request for a replica, whose clock is another one: its deadline is the time that is left."""
    return request.after(asyncio.get_running_loop().time() - started_s)


def _decode_request(request: GenerationRequest, first_chunk: TokenChunk, epoch: int, ticket: KVTicket) -> DecodeRequest:
    assert len(first_chunk.token_ids) == 1, f"prefill made {len(first_chunk.token_ids)} tokens, expected 1"
    return DecodeRequest(request=request, first_token_id=first_chunk.token_ids[0], epoch=epoch, ticket=ticket)


def _check_same_first_token(sent: TokenChunk, recomputed: TokenChunk) -> None:
    """Raises: Dsv4Error when the recomputed first token is not the one the client has."""
    if (sent.token_ids, sent.finish_reason) != (recomputed.token_ids, recomputed.finish_reason):
        raise Dsv4Error(
            f"recomputing the prompt gave first token {recomputed.token_ids}, but {sent.token_ids} was sent already"
        )


async def _next_chunk(stream: AsyncGenerator[TokenChunk, None], deadline_s: float) -> TokenChunk:
    """The next chunk of a decode stream. Raises: its error, DeadlineExceededError, WorkerLostError at a cut stream."""
    try:
        async with _deadline(deadline_s, "decode"):
            chunk = await anext(stream)
    except StopAsyncIteration:
        raise WorkerLostError("the decode stream ended before its last token") from None
    chunk.raise_if_failed()
    return chunk


@asynccontextmanager
async def _deadline(deadline_s: float, phase: str) -> AsyncGenerator[None, None]:
    """Bound one await by the request's deadline (loop time). Raises: DeadlineExceededError that names the phase."""
    scope = asyncio.timeout_at(deadline_s)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceededError(f"the request reached its time limit during {phase}") from None


async def _back_off(epoch: int, deadline_s: float) -> None:
    async with _deadline(deadline_s, "retry"):
        await asyncio.sleep(RETRY_BACKOFF_S * 2**epoch)


async def _close(stream: AsyncGenerator[TokenChunk, None], request_id: str, *, is_over: bool) -> None:
    """Abort a decode stream; one whose last chunk has come is run to its end instead, so that nothing is aborted."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            if is_over:
                await anext(stream, None)
            await stream.aclose()
    except (TimeoutError, Dsv4Error) as err:
        logger.warning("%s: the decode stream did not close cleanly: %r", request_id, err)
