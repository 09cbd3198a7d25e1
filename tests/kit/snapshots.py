"""Snapshots of replicas, for what decides by them."""

from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.protocol.stats import EngineStats


def snapshot(
    replica_id: str, *, role: str = "decode", layout_id: str = "L", num_running: int = 0, num_waiting_tokens: int = 0
) -> ReplicaSnapshot:
    """A replica with a small cache and this load."""
    stats = EngineStats(
        num_running=num_running,
        num_waiting=0,
        num_waiting_tokens=num_waiting_tokens,
        num_held=0,
        free_pages=8,
        num_pages=8,
        num_preemptions=0,
        total_prompt_tokens=0,
        total_generated_tokens=0,
        num_steps=0,
        last_step_ms=1.0,
    )
    return ReplicaSnapshot(replica_id=replica_id, role=role, node_id="n", layout_id=layout_id, stats=stats)
