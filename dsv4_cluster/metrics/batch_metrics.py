"""What a router counts about the batches that it runs."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class BatchMetrics:
    """Registered in the registry it is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lines = Counter(
            "dsv4_batch_lines", "Lines of batches by the status of their answer", ["status"], registry=registry
        )
        self._under_way = Gauge("dsv4_batches_under_way", "Batches that this router runs", registry=registry)

    def count_line(self, status: int) -> None:
        """One line has its answer."""
        self._lines.labels(str(status)).inc()

    def set_under_way(self, num_batches: int) -> None:
        """So many batches run here."""
        self._under_way.set(num_batches)
