"""Settings of `/v1/files` and `/v1/batches`: where they are kept, how much, and how fast batches run."""

from pydantic import Field

from dsv4_cluster.config.base import Settings


class BatchesConfig(Settings):
    """Bounds of the batches of one router; what is stored is shared by all routers that see the directory."""

    dir: str | None = Field(
        None,
        min_length=1,
        description="where files and batches are kept, the same for all routers; unset: /v1/files, /v1/batches are 404",
    )
    priority: int = Field(50, ge=0, le=1000, description="added to the priority of the batch's key; lower runs first")
    max_concurrent_lines: int = Field(16, ge=1, description="lines in flight per router, over all of its batches")
    max_concurrent_batches: int = Field(8, ge=1, description="batches under way per router; others wait their turn")
    max_file_bytes: int = Field(100 << 20, ge=1024, description="of an uploaded file; above it 413")
    max_lines_per_file: int = Field(50_000, ge=1, description="requests of one batch; above it the batch fails")
    max_files_per_tenant: int = Field(1000, ge=1, description="stored files; at the limit uploads are 429")
    max_bytes_per_tenant: int = Field(
        10 << 30, ge=1024, description="of all stored files, results included; at the limit uploads are 429"
    )
    max_batches_per_tenant: int = Field(
        1000, ge=1, description="remembered batches; a new one drops the oldest that is over, 429 when none is"
    )
