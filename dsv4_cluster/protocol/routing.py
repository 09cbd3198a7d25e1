"""What the router knows about replicas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """Load of one engine replica at one moment."""

    replica_id: str
    role: str  # "prefill" | "decode"
    node_id: str
    num_running: int
    num_waiting_tokens: int
    free_pages: int
    step_ms: float
    layout_id: str
    taken_at_s: float
