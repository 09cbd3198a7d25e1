"""Which replica takes the next request: a pure function of snapshots and of what this router has in flight."""

import random
from collections.abc import Mapping, Sequence

from dsv4_cluster.protocol.routing import ReplicaSnapshot


def least_loaded(
    snapshots: Sequence[ReplicaSnapshot], in_flight: Mapping[str, int], rng: random.Random
) -> ReplicaSnapshot | None:
    """Return the replica with the least work, None when there is no replica.

    in_flight: requests this router has sent and not seen end, by replica id. They come first in the order, because a
    snapshot is stale by its period: ranking by it alone makes every router pick the same replica until the next one.
    Ties are broken at random for the same reason.
    """
    if not snapshots:
        return None
    loads = [(in_flight.get(s.replica_id, 0), s.stats.num_waiting_tokens, s.stats.num_running) for s in snapshots]
    best = min(loads)
    return rng.choice([snapshot for snapshot, load in zip(snapshots, loads, strict=True) if load == best])
