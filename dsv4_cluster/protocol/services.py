"""The seams between router and workers. Serve handles implement them in `serve/clients.py`, fakes in tests."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from dsv4_cluster.protocol.handoff import DecodeRequest, KVTicket, PrefillResult
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.stored_response import StoredResponse


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


class ResponseStore(Protocol):
    """Responses that are kept for later requests, the same for all routers. Every call names the tenant: nobody finds
    what belongs to another one. Nothing is kept for ever: a response that is not found may have been dropped.
    """

    async def add(self, record: StoredResponse) -> None:
        """Keep a response. Raises: OverloadedError when there is no room beside responses that are under way."""
        ...

    async def replace(self, record: StoredResponse) -> bool:
        """Put a newer state of a response that is under way; False when it is over or gone."""
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The latest state."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False when there is none."""
        ...

    async def wait_until_over(self, tenant: str, response_id: str, timeout_s: float) -> bool:
        """True once the response is over or gone, False after `timeout_s`. Whoever generates a response waits here all
        the time: a cancellation is heard at once, and a response that nobody generates any more is known to be lost.
        """
        ...
