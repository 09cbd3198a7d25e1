"""The result of `dsv4 bench engine`: JSON lines, the run first, then one line per measurement."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4_cluster.bench.compare import Metric
from dsv4_cluster.bench.hardware import Hardware
from dsv4_cluster.bench.stats import Summary
from dsv4_cluster.errors import ConfigError

SCHEMA = "dsv4.bench.engine/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Repeated samples of one number. `params` tells measurements of one name apart; `details` are not compared."""

    name: str
    params: Mapping[str, int]
    unit: str
    is_higher_better: bool
    samples: tuple[float, ...]
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """`decode batch=8 context=128`."""
        return " ".join((self.name, *(f"{name}={value}" for name, value in self.params.items())))

    @property
    def summary(self) -> Summary:
        """Median and spread."""
        summary = Summary.of(self.samples)
        assert summary is not None, self.key
        return summary

    def to_line(self) -> str:
        """One JSON line."""
        values = {"type": "measurement", "key": self.key, **asdict(self)}
        return json.dumps({**values, "median": self.summary.p50, "spread": self.summary.spread})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What was measured, on what."""

    created: str  # ISO 8601, UTC
    version: str  # of this package
    torch_version: str
    hardware: Hardware
    checkpoint: str
    shape: Mapping[str, int]  # the model's main sizes
    dtype: str
    kv_cache_dtype: str
    num_threads: int
    read_gb_per_s: float  # measured, 1e9 bytes
    num_warmup: int
    num_repeats: int
    num_decode_steps: int
    seed: int
    unavailable: Mapping[str, str]  # part of the bench -> why this engine or checkpoint cannot do it

    def to_line(self) -> str:
        """One JSON line."""
        return json.dumps({"type": "run", "schema": SCHEMA, **asdict(self)})


def to_lines(run: EngineRun, measurements: Iterable[Measurement]) -> str:
    """The whole result."""
    return "".join(f"{line}\n" for line in (run.to_line(), *(m.to_line() for m in measurements)))


def engine_metrics(measurements: Iterable[Measurement]) -> dict[str, Metric]:
    """What runs are compared on: medians by key."""
    return {m.key: Metric(value=m.summary.p50, unit=m.unit, is_higher_better=m.is_higher_better) for m in measurements}


def read_baseline(path: Path) -> dict[str, Metric]:
    """Metrics of a stored result. Raises: ConfigError when the file is not one."""
    try:
        first, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        if first.get("schema") != SCHEMA:
            raise ConfigError(f"baseline {path}: schema is {first.get('schema')!r}, expected {SCHEMA!r}")
        return {line["key"]: _metric(line) for line in lines if line["type"] == "measurement"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"baseline {path}: not a result of dsv4 bench engine ({err})") from err


def _metric(line: Mapping[str, Any]) -> Metric:
    return Metric(value=line["median"], unit=line["unit"], is_higher_better=line["is_higher_better"])
