"""How one engine is split over ranks."""

from pydantic import Field

from dsv4_cluster.config.base import Settings


class ParallelConfig(Settings):
    """Sizes of the process mesh. This release runs one rank; the sharding rules are in place for more."""

    tp_size: int = Field(1, ge=1, le=1, description="tensor-parallel ranks (this release: 1)")
