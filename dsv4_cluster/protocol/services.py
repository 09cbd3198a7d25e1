"""The seams between router and workers. Serve handles implement them in `serve/clients.py`, fakes in tests."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from dsv4_cluster.protocol.handoff import DecodeRequest, KVTicket, PrefillResult
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest


class PrefillClient(Protocol):
    """All prefill replicas behind one face."""

    async def prefill(self, request: GenerationRequest, *, epoch: int) -> PrefillResult:
        """Compute the prompt and the first token, publish the cache. Cancelling the call aborts the request.

        Raises: WorkerLostError (retryable), InvalidRequestError, NonFiniteLogitsError.
        """
        ...

    async def release(self, ticket: KVTicket) -> None:
        """Drop a lease that will not be fetched. Unknown tickets are ignored."""
        ...


class DecodeClient(Protocol):
    """All decode replicas behind one face."""

    def decode(self, request: DecodeRequest) -> AsyncGenerator[TokenChunk, None]:
        """Import the cache and stream every token after the first one, ending with a chunk that has finish_reason.

        Closing the iterator early aborts the request. Raises: KVTransferError, WorkerLostError (both retryable).
        """
        ...


class GenerationService(Protocol):
    """What the HTTP front end needs; the router implements it."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream every token of the answer, first one included. Closing the iterator early aborts the request."""
        ...

    def model_names(self) -> Sequence[str]:
        """Served model names, the canonical one first."""
        ...

    async def unready_reasons(self) -> Sequence[str]:
        """Why a request would not be accepted now, one sentence each; empty when it would."""
        ...
