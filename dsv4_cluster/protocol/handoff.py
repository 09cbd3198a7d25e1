"""How a prefilled sequence moves to a decode replica: the ticket is small and printable, the bytes go elsewhere."""

from dataclasses import dataclass

from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest

POOLS = ("window", "compressed", "indexer", "state", "last_hidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSegment:
    """One contiguous run of live cache bytes. Segments of a ticket lie back to back, in order, in one payload."""

    pool: str  # one of POOLS
    layer_start: int
    layer_end: int  # exclusive
    num_rows: int  # cache rows (entries) in the segment, all its layers together
    num_bytes: int
    checksum: int  # see transfer/checksum.py; binds the bytes to request id and epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTicket:
    """A lease on published bytes: who may fetch what, from where, until when."""

    ticket_id: str
    request_id: str
    epoch: int  # attempt number of the request; a ticket of another attempt is stale
    backend: str  # "local" | "shm" | "grpc"
    endpoints: tuple[str, ...]  # backend addresses, preferred first
    layout_id: str
    num_tokens: int  # tokens whose cache rows are in the payload
    segments: tuple[KVSegment, ...]
    expires_at_s: float  # on the publisher's clock; informative for others

    @property
    def num_bytes(self) -> int:
        """Payload size in bytes."""
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What a prefill replica answers. `ticket` is None when the first token already ended the request."""

    request_id: str
    first_chunk: TokenChunk
    ticket: KVTicket | None
    num_prompt_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """What a decode replica needs to go on: the request, its first token and the ticket to the prompt's cache."""

    request: GenerationRequest
    first_token_id: int
    epoch: int
    ticket: KVTicket
