"""What `dsv4 bench serve` shows while it runs, on stderr so that stdout stays clean, and its table of results."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dsv4_cluster.bench.charts import number
from dsv4_cluster.bench.client import RequestRecord
from dsv4_cluster.bench.load import RunResult
from dsv4_cluster.bench.serve_report import record_line
from dsv4_cluster.bench.serve_summary import PointSummary
from dsv4_cluster.bench.stats import Summary

_REFRESH_PER_S = 4


class ServeDisplay:
    """Shows a load run as it goes: a bar per load point, the numbers of those that are done. Writes request lines."""

    def __init__(self, records_path: Path | None) -> None:
        self._records_path = records_path
        self._records: TextIO | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[cyan]{task.fields[in_flight]} in flight  [red]{task.fields[failed]}"),
        )
        self._live = Live(console=Console(stderr=True), refresh_per_second=_REFRESH_PER_S, transient=True)
        self._task: TaskID | None = None
        self._in_flight = 0
        self._num_failed = 0
        self._points: list[PointSummary] = []

    def __enter__(self) -> Self:
        if self._records_path is not None:
            self._records = self._records_path.open("w", encoding="utf-8")
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._records is not None:
            self._records.close()

    def point_started(self, label: str, num_requests: int) -> None:
        """Begin a bar."""
        self._in_flight = self._num_failed = 0
        self._task = self._progress.add_task(label, total=num_requests, in_flight=0, failed="")
        self._draw()

    def request_started(self) -> None:
        """Count a request in."""
        self._in_flight += 1
        self._update(advance=0)

    def request_done(self, record: RequestRecord) -> None:
        """Count a request out."""
        self._in_flight -= 1
        self._num_failed += not record.is_ok
        self._update(advance=1)

    def point_done(self, point: PointSummary, result: RunResult) -> None:
        """Add a row, store the requests."""
        self._points.append(point)
        if self._records is not None:
            self._records.writelines(record_line(point, record) + "\n" for record in result.records)
        self._draw()

    def _update(self, *, advance: int) -> None:
        assert self._task is not None
        failed = f"{self._num_failed} failed" if self._num_failed else ""
        self._progress.update(self._task, advance=advance, in_flight=self._in_flight, failed=failed)

    def _draw(self) -> None:
        shown = [point_table(self._points)] if self._points else []
        self._live.update(Group(*shown, self._progress))


def point_table(points: Sequence[PointSummary]) -> Table:
    """One column per load point; latencies as p50 / p99, so that a few points fit a narrow terminal."""
    table = Table(title="Latencies in ms, p50 / p99", title_justify="left")
    table.add_column("load", no_wrap=True)
    for point in points:
        table.add_column(point.label, justify="right")
    failed = [point.num_requests - point.num_ok for point in points]
    table.add_row("answered", *(str(point.num_ok) for point in points))
    table.add_row("failed", *(Text(str(count), style="red" if count else "") for count in failed), end_section=True)
    for name in ("ttft", "tpot", "itl", "e2e"):
        table.add_row(name.upper(), *(_ranks(getattr(point, f"{name}_ms")) for point in points))
    table.add_section()
    table.add_row("output tok/s", *(number(point.output_throughput) for point in points))
    table.add_row("requests/s", *(number(point.request_throughput) for point in points))
    if any(point.goodput is not None for point in points):
        table.add_row("goodput, requests/s", *(number(point.goodput or 0.0) for point in points))
    table.add_row("prompt from cache", *(f"{point.cached_fraction * 100:.0f} %" for point in points))
    return table


def _ranks(summary: Summary | None) -> str:
    return "-" if summary is None else f"{number(summary.p50)} / {number(summary.p99)}"
