"""From request records to the numbers of a load point."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_cluster.bench.client import RequestRecord
from dsv4_cluster.bench.load import LoadSpec, RunResult
from dsv4_cluster.bench.stats import Summary, bin_counts, percentile
from dsv4_cluster.errors import ConfigError

_MS = 1e3
_SLO_NAMES = ("ttft", "tpot", "e2e")
_NUM_BINS = 60  # of a timeline: enough for a plot, few enough to even out single tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """Limits that one request has to keep, in milliseconds; None = no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> "SLO":
        """`ttft:2000,tpot:50` -> SLO. Raises: ConfigError."""
        limits: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition(":")
            try:
                limits[f"{name.strip()}_ms"] = float(value)
            except ValueError as err:
                raise ConfigError(f"slo: {part!r} is not NAME:MILLISECONDS") from err
            if name.strip() not in _SLO_NAMES:
                raise ConfigError(f"slo: unknown name {name.strip()!r}, expected one of {', '.join(_SLO_NAMES)}")
        return cls(**limits)

    @property
    def is_set(self) -> bool:
        """True when there is any limit."""
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def holds(self, record: RequestRecord) -> bool:
        """True when a request was answered in full and within every limit; a time it does not have cannot break one."""
        times = ((record.ttft_s, self.ttft_ms), (record.tpot_s, self.tpot_ms), (record.e2e_s, self.e2e_ms))
        return record.is_ok and all(limit is None or time_s is None or time_s * _MS <= limit for time_s, limit in times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """Failures of one kind, with one message as an example."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Per interval of `width_s` from the start of the run."""

    width_s: float
    output_tokens_per_s: tuple[float, ...]
    in_flight: tuple[int, ...]  # at the interval's start


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Percentiles 0 to 100 of each latency, in ms, for plots; empty without samples."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    e2e_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSummary:
    """One load point. Latencies in ms over answered requests; token counts as the server reported them."""

    label: str
    concurrency: int | None
    rate: float | None
    duration_s: float
    num_requests: int
    num_ok: int
    errors: tuple[ErrorCount, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    request_throughput: float  # answered requests per second
    output_throughput: float  # output tokens per second
    total_throughput: float  # input and output tokens per second
    goodput: float | None  # requests per second within the SLO; None without one
    slo_attainment: float | None  # fraction of all requests
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    e2e_ms: Summary | None
    lag_ms: Summary | None  # how late this process sent
    tokens_per_event: float | None
    cached_fraction: float  # of the prompt tokens, from the server's prefix cache
    curves: Curves
    timeline: Timeline


def summarise(load: LoadSpec, result: RunResult, slo: SLO) -> PointSummary:
    """Sum up one run."""
    answered = [record for record in result.records if record.is_ok]
    ttft_ms = _present_ms([record.ttft_s for record in answered])
    tpot_ms = _present_ms([record.tpot_s for record in answered])
    itl_ms = _present_ms([gap for record in answered for gap in record.itl_s])
    e2e_ms = _present_ms([record.e2e_s for record in answered])
    num_good = sum(slo.holds(record) for record in result.records)
    prompt = sum(record.num_prompt_tokens for record in answered)
    output = sum(record.num_output_tokens for record in answered)
    cached = sum(record.num_cached_tokens for record in answered)
    num_events = sum(len(record.event_s) for record in answered)
    duration_s = result.duration_s

    def per_second(amount: float) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    return PointSummary(
        label=load.label,
        concurrency=load.concurrency,
        rate=load.rate,
        duration_s=duration_s,
        num_requests=len(result.records),
        num_ok=len(answered),
        errors=_errors(result.records),
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=output,
        request_throughput=per_second(len(answered)),
        output_throughput=per_second(output),
        total_throughput=per_second(prompt + output),
        goodput=per_second(num_good) if slo.is_set else None,
        slo_attainment=num_good / len(result.records) if slo.is_set and result.records else None,
        ttft_ms=Summary.of(ttft_ms),
        tpot_ms=Summary.of(tpot_ms),
        itl_ms=Summary.of(itl_ms),
        e2e_ms=Summary.of(e2e_ms),
        lag_ms=Summary.of(_present_ms([record.sent_s - record.due_s for record in result.records])),
        tokens_per_event=output / num_events if num_events else None,
        cached_fraction=cached / prompt if prompt else 0.0,
        curves=Curves(ttft_ms=_curve(ttft_ms), tpot_ms=_curve(tpot_ms), itl_ms=_curve(itl_ms), e2e_ms=_curve(e2e_ms)),
        timeline=_timeline(result),
    )


def _present_ms(times_s: Sequence[float | None]) -> list[float]:
    return [time_s * _MS for time_s in times_s if time_s is not None]


def _curve(samples: Sequence[float]) -> tuple[float, ...]:
    ranked = sorted(samples)
    return tuple(percentile(ranked, percent) for percent in range(101)) if ranked else ()


def _errors(records: Sequence[RequestRecord]) -> tuple[ErrorCount, ...]:
    """Most frequent first."""
    counts = Counter(record.error_kind for record in records if record.error_kind is not None)
    examples = {record.error_kind: record.error_message for record in reversed(records)}
    return tuple(ErrorCount(kind=kind, count=count, example=examples[kind]) for kind, count in counts.most_common())


def _timeline(result: RunResult) -> Timeline:
    """Output tokens are spread evenly over the pieces of their answer."""
    width_s = max(result.duration_s / _NUM_BINS, 1e-3)
    times: list[float] = []
    weights: list[float] = []
    for record in result.records:
        times += record.event_s
        weights += [max(1.0, record.num_output_tokens / max(1, len(record.event_s)))] * len(record.event_s)
    tokens = bin_counts(times, weights, end_s=result.duration_s, width_s=width_s)
    in_flight = [
        sum(record.sent_s <= index * width_s < record.done_s for record in result.records)
        for index in range(len(tokens))
    ]
    return Timeline(
        width_s=width_s, output_tokens_per_s=tuple(count / width_s for count in tokens), in_flight=tuple(in_flight)
    )
