"""The HTML report of an engine run."""

from collections.abc import Sequence

from dsv4_cluster.bench.charts import Chart, Series, number, render
from dsv4_cluster.bench.compare import Comparison
from dsv4_cluster.bench.engine_report import EngineRun, Measurement
from dsv4_cluster.bench.page import Cell, Row, charts, comparison_section, fold, page, table, warning


def render_page(run: EngineRun, measurements: Sequence[Measurement], comparison: Comparison | None = None) -> str:
    """The whole document."""
    sections = [warning(f"{part}: not measured. {reason}") for part, reason in run.unavailable.items()]
    sections.append(charts("At a glance", _figures(measurements)))
    sections.append(_table(measurements))
    if comparison is not None:
        sections.append(comparison_section(comparison))
    sections.append(fold("The run", run.to_line()))
    return page("Engine benchmark", _subtitle(run), sections)


def _subtitle(run: EngineRun) -> str:
    hardware = run.hardware
    return (
        f"{run.checkpoint}, {run.dtype}, {hardware.accelerator or hardware.cpu}, {run.num_threads} threads, memory "
        f"read at {number(run.read_gb_per_s)} GB/s, torch {run.torch_version}, {run.created}. Medians of "
        f"{run.num_repeats} samples after {run.num_warmup} for warm-up."
    )


def _figures(measurements: Sequence[Measurement]) -> list[str]:
    prefill = [m for m in measurements if m.name == "prefill"]
    decode = [m for m in measurements if m.name == "decode"]
    drafts = [m for m in measurements if m.name == "speculation"]
    contexts = list(dict.fromkeys(m.params["context"] for m in decode))
    by_context = [(f"context {context}", [m for m in decode if m.params["context"] == context]) for context in contexts]
    return [
        _figure("Prefill", "prompt tokens", [("prefill", prefill)], "tokens"),
        _figure("Decode", "batch size", by_context, "batch"),
        _figure("Speculation, one sequence", "drafts per step", [("speculation", drafts)], "drafts"),
    ]


def _figure(title: str, x_label: str, lines: Sequence[tuple[str, Sequence[Measurement]]], param: str) -> str:
    """Medians in tok/s over a parameter, which takes equally spaced places."""
    values = sorted({m.params[param] for _, line in lines for m in line})
    if len(values) < 2:
        return ""  # the table says it better
    series = tuple(
        Series(
            label=label,
            points=tuple((float(values.index(m.params[param])), m.summary.p50) for m in line),
            colour=colour,
            has_markers=True,
        )
        for colour, (label, line) in enumerate(lines)
    )
    names = tuple(f"{value:,}" for value in values)
    return render(Chart(title=title, x_label=x_label, y_label="tok/s", series=series, x_names=names))


def _table(measurements: Sequence[Measurement]) -> str:
    header = ["Measurement", "median", "unit", "spread", "min", "max", "details"]
    rows: list[Row] = [
        [
            m.key,
            number(m.summary.p50),
            m.unit,
            number(m.summary.spread),
            number(m.summary.min),
            number(m.summary.max),
            Cell(details_text(m), "text"),
        ]
        for m in measurements
    ]
    return table("Measurements (spread = interquartile range)", header, rows)


def details_text(measurement: Measurement) -> str:
    """`step_ms 12.3, read_fraction 0.41`."""
    return ", ".join(f"{name} {number(value)}" for name, value in measurement.details.items())
