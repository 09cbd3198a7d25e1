"""The result of `dsv4 bench serve`: one JSON document, readable again as a baseline."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4_cluster.bench.client import Api, RequestRecord
from dsv4_cluster.bench.compare import Metric
from dsv4_cluster.bench.hardware import Hardware
from dsv4_cluster.bench.serve_summary import SLO, PointSummary
from dsv4_cluster.bench.workload import WorkloadSpec
from dsv4_cluster.errors import ConfigError

SCHEMA = "dsv4.bench.serve/1"
_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """Everything a reader needs to judge and repeat a run. Load points are in the order they ran."""

    created: str  # ISO 8601, UTC
    base_url: str
    api: Api
    model: str
    client: Hardware  # the machine that sent the load, not the servers
    version: str  # of this package
    workload: WorkloadSpec
    num_warmup: int
    temperature: float
    burstiness: float
    think_time_s: float
    timeout_s: float
    extra_body: dict[str, object]
    slo: SLO
    points: tuple[PointSummary, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {"schema": SCHEMA, **asdict(self)}

    @property
    def metrics(self) -> dict[str, Metric]:
        """What a later run is compared on."""
        return serve_metrics(self.to_dict())


def serve_metrics(document: dict[str, Any]) -> dict[str, Metric]:
    """Metrics of a report's JSON document, keyed `load / name`."""
    metrics: dict[str, Metric] = {}
    for point in document["points"]:
        label = point["label"]
        throughput = Metric(value=point["output_throughput"], unit="tok/s", is_higher_better=True)
        metrics[f"{label} / output throughput"] = throughput
        if point["goodput"] is not None:
            metrics[f"{label} / goodput"] = Metric(value=point["goodput"], unit="req/s", is_higher_better=True)
        for name in _LATENCIES:
            if point[name] is not None:
                for rank in ("p50", "p99"):
                    metric = Metric(value=point[name][rank], unit="ms", is_higher_better=False)
                    metrics[f"{label} / {name.removesuffix('_ms').upper()} {rank}"] = metric
    return metrics


def read_baseline(path: Path) -> dict[str, Metric]:
    """Metrics of a stored report. Raises: ConfigError when the file is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("schema") != SCHEMA:
            raise ConfigError(f"baseline {path}: schema is {document.get('schema')!r}, expected {SCHEMA!r}")
        return serve_metrics(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"baseline {path}: not a report of dsv4 bench serve ({err})") from err


def record_line(point: PointSummary, record: RequestRecord) -> str:
    """One request as a JSON line; the answer's text stays out."""
    fields = asdict(record)
    del fields["text"]
    return json.dumps({"load": point.label, **fields, "ttft_s": record.ttft_s, "tpot_s": record.tpot_s})
