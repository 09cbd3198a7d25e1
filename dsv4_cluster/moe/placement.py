"""Which rank holds which routed expert: contiguous ranges. Source: spec 2.4."""

from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.shard import ShardRule

EXPERT_RULE = ShardRule(0, "ep")  # over the expert index


def local_experts(num_experts: int, parallel: ParallelState) -> range:
    """Global ids of the experts of this rank. Raises: ConfigError when they do not divide over the ranks."""
    return range(*EXPERT_RULE.bounds(num_experts, parallel.ep_rank, parallel.ep_size))
