"""The text of `/metrics`: what all routers count, each with its own label, and the load of every replica.

A scrape through a load balancer reaches one router at a time; so each one answers for all of them.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dsv4_cluster.metrics.names import ENGINE, PREFIX_CACHE, PREFIX_CACHE_PARTS
from dsv4_cluster.protocol.routing import ReplicaSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricsPage = Callable[[], Awaitable[str]]


def registry_text(registry: CollectorRegistry) -> str:
    """A registry in Prometheus's text format."""
    return generate_latest(registry).decode()


def merged_text(pages: Mapping[str, str], snapshots: Sequence[ReplicaSnapshot]) -> str:
    """One page out of those of several routers, by router id, and of the replicas' snapshots."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*_labelled(pages), *_replica_families(snapshots)]))
    return registry_text(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _labelled(pages: Mapping[str, str]) -> Iterable[Metric]:
    families: dict[str, Metric] = {}
    for router_id, page in sorted(pages.items()):
        for family in text_string_to_metric_families(page):
            if family.name.endswith("_created"):
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {"router": router_id, **sample.labels}, sample.value)
    return families.values()


def _replica_families(snapshots: Sequence[ReplicaSnapshot]) -> Iterable[Metric]:
    """Gauges and counters of every live replica, from what its engine reported last."""
    engines = [({"role": s.role, "replica": s.replica_id}, s.stats) for s in snapshots]
    caches = [(labels, stats.prefix_cache) for labels, stats in engines]
    for name, (field, documentation) in ENGINE.items():
        yield _family(name, documentation, ((labels, getattr(stats, field)) for labels, stats in engines))
    for name, (field, documentation) in PREFIX_CACHE.items():
        yield _family(name, documentation, ((labels, getattr(stats, field)) for labels, stats in caches))
    for name, (label, parts, documentation) in PREFIX_CACHE_PARTS.items():
        samples = (
            (labels | {label: value}, getattr(stats, field))
            for labels, stats in caches
            for value, field in parts.items()
        )
        yield _family(name, documentation, samples)


def _family(name: str, documentation: str, samples: Iterable[tuple[dict[str, str], float]]) -> Metric:
    base = name.removesuffix("_total")
    family = Metric(base, documentation, "gauge" if base == name else "counter")
    for labels, value in samples:
        family.add_sample(name, labels, float(value))
    return family
