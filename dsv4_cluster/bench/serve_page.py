"""The HTML report of a load run: what happened, at a glance first."""

import json
from collections.abc import Callable, Sequence

from dsv4_cluster.bench.charts import Chart, Series, number, render
from dsv4_cluster.bench.compare import Comparison
from dsv4_cluster.bench.page import Cell, Row, Tile, charts, comparison_section, fold, page, table, tiles, warning
from dsv4_cluster.bench.serve_report import ServeReport
from dsv4_cluster.bench.serve_summary import SLO, PointSummary
from dsv4_cluster.bench.stats import Summary
from dsv4_cluster.bench.workload import WorkloadSpec

_LIMIT_COLOUR = 6
LAG_LIMIT_MS = 50.0  # a client that sends later than this distorts what it measures


def render_page(report: ServeReport, comparison: Comparison | None = None) -> str:
    """The whole document."""
    points = report.points
    sections = [*(warning(text) for text in warnings(report)), _headline(report), _latency_table(points)]
    if len(points) > 1:
        sections.append(charts("Load and latency", _sweep(points)))
    sections.append(charts("Distribution of latencies", _distributions(points, report.slo)))
    sections.append(charts("Over the run", [figure for point in points for figure in _timelines(point)]))
    sections.append(_volume_table(points))
    if any(point.errors for point in points):
        sections.append(_error_table(points))
    if comparison is not None:
        sections.append(comparison_section(comparison))
    settings = {key: value for key, value in report.to_dict().items() if key != "points"}
    sections.append(fold("All settings", json.dumps(settings, indent=2)))
    subtitle = f"{report.model} at {report.base_url} ({report.api}), {report.created}. {describe(report.workload)}."
    return page("Serving benchmark", subtitle, sections)


def warnings(report: ServeReport) -> list[str]:
    """What makes the numbers doubtful."""
    found = []
    for point in report.points:
        num_failed = point.num_requests - point.num_ok
        if num_failed:
            found.append(
                f"{point.label}: {num_failed} of {point.num_requests} requests failed; latencies are of the others."
            )
        if point.lag_ms is not None and point.lag_ms.p99 > LAG_LIMIT_MS:
            found.append(
                f"{point.label}: requests left up to {number(point.lag_ms.p99)} ms late (p99). This client was too "
                "busy: run it on another machine or lower the load."
            )
    return found


def describe(workload: WorkloadSpec) -> str:
    """One sentence about a workload."""
    lengths = f"{workload.input_tokens} words in, {workload.output_tokens} tokens out"
    if workload.kind == "random":
        low = round(workload.range_ratio * 100)
        lengths = f"up to {workload.input_tokens} words in and {workload.output_tokens} tokens out ({low}-100 %)"
    if workload.kind == "multi-turn":
        lengths = f"{workload.num_turns} turns of {lengths}"
    prefix = ""
    if workload.prefix_tokens:
        prefix = f", after one of {workload.num_prefixes} shared prefixes of {workload.prefix_tokens} words"
    return f"{workload.num_requests} requests, {workload.kind}: {lengths}{prefix}"


def _headline(report: ServeReport) -> str:
    """Tiles of the point with the largest output throughput."""
    if not report.points:
        return ""
    best = max(report.points, key=lambda point: point.output_throughput)
    many = len(report.points) > 1
    entries = [
        Tile(number(best.output_throughput), "tok/s", f"output, {'best: ' if many else ''}{best.label}"),
        Tile(number(best.request_throughput), "req/s", f"{best.num_ok} of {best.num_requests} answered"),
        *(_latency_tile(name, summary) for name, summary in (("TTFT", best.ttft_ms), ("TPOT", best.tpot_ms))),
    ]
    if best.goodput is not None and best.slo_attainment is not None:
        share = f"{best.slo_attainment * 100:.0f} % within {describe_slo(report.slo)}"
        entries.append(Tile(number(best.goodput), "req/s", f"goodput, {share}"))
    if best.num_cached_tokens:
        entries.append(Tile(f"{best.cached_fraction * 100:.0f}", "%", "of prompt tokens from the prefix cache"))
    return tiles(entries)


def describe_slo(slo: SLO) -> str:
    """`TTFT 2,000 ms, TPOT 50 ms`."""
    limits = (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} {number(limit)} ms" for name, limit in limits if limit is not None)


def _latency_tile(name: str, summary: Summary | None) -> Tile:
    if summary is None:
        return Tile("-", "", f"{name}: no samples")
    return Tile(number(summary.p50), "ms", f"{name} p50, p99 {number(summary.p99)} ms")


def _latency_table(points: Sequence[PointSummary]) -> str:
    header = ["Latency (ms)"]
    for name in ("TTFT", "TPOT", "ITL", "E2E"):
        header += [f"{name} p50", "p90", "p99"]
    rows = []
    for point in points:
        row = [point.label]
        for summary in (point.ttft_ms, point.tpot_ms, point.itl_ms, point.e2e_ms):
            row += ["-"] * 3 if summary is None else [number(v) for v in (summary.p50, summary.p90, summary.p99)]
        rows.append(row)
    return table("Latencies", header, rows)


def _volume_table(points: Sequence[PointSummary]) -> str:
    header = ["Load", "seconds", "answered", "failed", "in", "cached", "out", "out tok/s", "total tok/s",
              "req/s", "goodput", "tok/event", "late p99 ms"]  # fmt: skip
    rows: list[Row] = [
        [
            point.label,
            number(point.duration_s),
            str(point.num_ok),
            Cell(str(point.num_requests - point.num_ok), "bad" if point.num_ok < point.num_requests else ""),
            f"{point.num_prompt_tokens:,}",
            f"{point.cached_fraction * 100:.0f} %",
            f"{point.num_output_tokens:,}",
            number(point.output_throughput),
            number(point.total_throughput),
            number(point.request_throughput),
            "-" if point.goodput is None else number(point.goodput),
            "-" if point.tokens_per_event is None else number(point.tokens_per_event),
            "-" if point.lag_ms is None else number(point.lag_ms.p99),
        ]
        for point in points
    ]
    return table("Volume and rate", header, rows)


def _error_table(points: Sequence[PointSummary]) -> str:
    rows: list[Row] = [
        [point.label, str(error.count), Cell(error.kind, "text"), Cell(error.example, "text")]
        for point in points
        for error in point.errors
    ]
    return table("Failures", ["Load", "count", "kind", "for example"], rows)


def _sweep(points: Sequence[PointSummary]) -> list[str]:
    names = tuple(point.label for point in points)

    def ranks(pick: Callable[[PointSummary], Summary | None]) -> tuple[Series, ...]:
        found = [(float(index), summary) for index, point in enumerate(points) if (summary := pick(point)) is not None]
        return tuple(
            Series(
                label=rank,
                points=tuple((x, getattr(summary, rank)) for x, summary in found),
                colour=colour,
                has_markers=True,
            )
            for colour, rank in enumerate(("p50", "p90", "p99"))
        )

    throughput = tuple((float(index), point.output_throughput) for index, point in enumerate(points))
    per_user = tuple(
        (1e3 / point.tpot_ms.p50, point.output_throughput)
        for point in points
        if point.tpot_ms is not None and point.tpot_ms.p50 > 0
    )
    one = Series(label="output", points=throughput, has_markers=True)
    trade = Series(label="load points", points=per_user, has_markers=True)
    return [
        render(Chart(title="Output throughput", x_label="load", y_label="tok/s", series=(one,), x_names=names)),
        render(Chart(title="Throughput against speed per user", x_label="tok/s per user (1 / TPOT p50)",
                     y_label="tok/s in total", series=(trade,))),
        render(Chart(title="Time to first token", x_label="load", y_label="ms", series=ranks(lambda p: p.ttft_ms),
                     x_names=names)),
        render(Chart(title="Time per output token", x_label="load", y_label="ms", series=ranks(lambda p: p.tpot_ms),
                     x_names=names)),
    ]  # fmt: skip


def _distributions(points: Sequence[PointSummary], slo: SLO) -> list[str]:
    """Share of samples at or below a latency, and where the SLO's limit lies."""
    picks: tuple[tuple[str, float | None, Callable[[PointSummary], tuple[float, ...]]], ...] = (
        ("Time to first token", slo.ttft_ms, lambda point: point.curves.ttft_ms),
        ("Time per output token", slo.tpot_ms, lambda point: point.curves.tpot_ms),
        ("Gap between pieces", None, lambda point: point.curves.itl_ms),
        ("Whole answer", slo.e2e_ms, lambda point: point.curves.e2e_ms),
    )
    figures = []
    for title, limit, pick in picks:
        lines = [
            Series(
                label=point.label,
                points=tuple((value, float(percent)) for percent, value in enumerate(pick(point))),
                colour=colour,
            )
            for colour, point in enumerate(points)
        ]
        if limit is not None and any(line.points for line in lines):
            lines.append(
                Series(label="limit", points=((limit, 0.0), (limit, 100.0)), colour=_LIMIT_COLOUR, is_dashed=True)
            )
        figures.append(render(Chart(title=title, x_label="ms", y_label="% of samples", series=tuple(lines))))
    return figures


def _timelines(point: PointSummary) -> list[str]:
    """Rate of output tokens, and requests in flight."""
    line = point.timeline
    rate = tuple((index * line.width_s, value) for index, value in enumerate(line.output_tokens_per_s))
    flight = tuple((index * line.width_s, float(count)) for index, count in enumerate(line.in_flight))
    tokens = Series(label="output", points=rate, is_area=True)
    requests = Series(label="in flight", points=flight, colour=1, is_area=True)
    return [
        render(Chart(title=f"Output tokens, {point.label}", x_label="seconds", y_label="tok/s", series=(tokens,))),
        render(Chart(title=f"In flight, {point.label}", x_label="seconds", y_label="requests", series=(requests,))),
    ]
