"""Result tables that the measuring commands share."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dsv4_cluster.bench.charts import number
from dsv4_cluster.bench.compare import Comparison
from dsv4_cluster.bench.engine_page import details_text
from dsv4_cluster.bench.engine_report import Measurement

_STYLES = {"good": "green", "bad": "red", "": ""}


def measurement_table(measurements: Sequence[Measurement]) -> Table:
    """Medians and spread of an engine run."""
    table = Table(title="Medians; spread = interquartile range", title_justify="left")
    for name in ("measurement", "median", "spread", "details"):
        table.add_column(name, justify="right" if name in ("median", "spread") else "left")
    for m in measurements:
        table.add_row(m.key, f"{number(m.summary.p50)} {m.unit}", number(m.summary.spread), details_text(m))
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Metrics of two runs; green is better than the baseline."""
    shared = "" if comparison.changes else ": it shares no measurement with this run"
    table = Table(title=f"Against the baseline{shared}", title_justify="left")
    for name in ("metric", "baseline", "this run", "gain"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for change in comparison.changes:
        table.add_row(
            change.key,
            f"{number(change.before)} {change.unit}",
            f"{number(change.after)} {change.unit}",
            Text(f"{change.gain:.2f}x", style=_STYLES[change.verdict]),
        )
    return table
