"""Settings of the prefill-to-decode cache transfer."""

from typing import Literal

from pydantic import Field

from dsv4_cluster.config.base import Settings

MAX_CHUNK_BYTES = 16 << 20  # a receiver accepts this much in one message, whatever its own chunk_bytes


class TransferConfig(Settings):
    """Backend and lease."""

    backend: Literal["local", "shm", "grpc"] = Field(
        "shm",
        description="shm = same host through memfd, with grpc as fallback; grpc = between hosts; local = one process",
    )
    lease_s: float = Field(60.0, gt=0, description="seconds after which an unfetched payload is dropped")
    fetch_timeout_s: float = Field(30.0, gt=0, description="seconds a fetch may take")
    chunk_bytes: int = Field(1 << 20, ge=4096, le=MAX_CHUNK_BYTES, description="message size of the grpc stream")
    max_staged_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="payload bytes a prefill worker keeps published; a prompt that alone takes more is refused (400)",
    )
    bind_host: str = Field("127.0.0.1", description="address the grpc endpoint listens on; 0.0.0.0 between hosts")
    advertise_host: str | None = Field(
        None, description="address peers use; default: bind_host, or this node's IP for 0.0.0.0"
    )
