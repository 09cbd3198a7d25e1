"""Does the graph fit on the cluster? Asked before Serve would wait for ever for resources that do not exist."""

from collections.abc import Mapping, Sequence

import ray

from dsv4_cluster.config.cluster_config import ClusterConfig, WorkerRole
from dsv4_cluster.errors import ConfigError

MIN_BUNDLE_CPUS = 0.001  # a placement bundle must ask for something; this is ten of Ray's smallest units

Resources = Mapping[str, float]


def role_bundles(role: WorkerRole) -> list[dict[str, float]]:
    """Placement bundles of one replica: its own first, then one per rank."""
    worker = {"CPU": max(role.worker_num_cpus, MIN_BUNDLE_CPUS)}
    if role.worker_num_gpus:
        worker["GPU"] = role.worker_num_gpus
    return [{"CPU": max(role.num_cpus, MIN_BUNDLE_CPUS)}, *[dict(worker) for _ in range(role.parallel.tp_size)]]


def check_placement(config: ClusterConfig, nodes: Sequence[Resources]) -> None:
    """Compare what the graph asks for with what the nodes have in total, used or not.

    nodes: total resources of every live node, under Ray's names.
    Raises: ConfigError with the sum, or with the largest single ask that no node can hold.
    """
    asks = _asks(config)
    for kind in ("CPU", "GPU"):
        need = sum(num_replicas * sum(b.get(kind, 0.0) for b in bundles) for _, num_replicas, bundles in asks)
        have = sum(node.get(kind, 0.0) for node in nodes)
        if need > have:
            terms = [
                f"{name} {num_replicas} x ({' + '.join(f'{b[kind]:g}' for b in bundles if kind in b)})"
                for name, num_replicas, bundles in asks
                if any(kind in b for b in bundles)
            ]
            raise ConfigError(f"the graph needs {need:g} {kind}s = {' + '.join(terms)}, the cluster has {have:g}")
        largest = max(b.get(kind, 0.0) for _, _, bundles in asks for b in bundles)
        biggest_node = max((node.get(kind, 0.0) for node in nodes), default=0.0)
        if largest > biggest_node:
            raise ConfigError(f"one process asks for {largest:g} {kind}s, the largest node has {biggest_node:g}")


def live_nodes() -> list[Resources]:
    """Total resources of every live node of the connected Ray cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _asks(config: ClusterConfig) -> list[tuple[str, int, list[dict[str, float]]]]:
    return [
        ("router", config.router.num_replicas, [{"CPU": config.router.num_cpus}]),
        ("prefill", config.prefill.num_replicas, role_bundles(config.prefill)),
        ("decode", config.decode.num_replicas, role_bundles(config.decode)),
    ]
