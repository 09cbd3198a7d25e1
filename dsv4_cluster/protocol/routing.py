"""What the router knows about replicas."""

from dataclasses import dataclass

from dsv4_cluster.protocol.stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """Load of one engine replica at one moment."""

    replica_id: str
    role: str  # "prefill" | "decode"
    node_id: str
    layout_id: str
    stats: EngineStats
