"""Settings of `/v1/responses`: how many answers are kept for `previous_response_id` and retrieval, and for how long."""

from pydantic import Field

from dsv4_cluster.config.base import Settings


class ResponsesConfig(Settings):
    """Bounds of the response store, which lies in memory: in the router, or beside several routers in a process."""

    max_entries: int = Field(10_000, ge=0, description="stored responses; 0 = nothing is stored, store: true is a 400")
    max_bytes: int = Field(
        256 << 20, ge=1 << 16, description="of stored responses with their inputs; the least recently used one goes"
    )
    ttl_s: float = Field(24 * 3600.0, gt=0, description="a response is forgotten so long after its last use")
    max_background: int = Field(
        256, ge=0, description="background responses under way per router; above it 429, 0 = background is a 400"
    )
