"""What a checkpoint or a shape preset consists of: tensors, dtypes, bytes, parameters, bytes per rank of a split."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.tools.presets import preset_config
from dsv4_cluster.weights.inventory import DTYPE_BYTES, TensorSpec, inventory
from dsv4_cluster.weights.reader import Checkpoint

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ParallelSplit:
    """Sizes of the mesh axes. Every data-parallel replica holds the dense weights; experts split over `ep` ranks."""

    tp: int
    ep: int
    dp: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.tp * self.dp


DEFAULT_SPLITS = (
    ParallelSplit(1, 1, 1),
    ParallelSplit(2, 2, 1),
    ParallelSplit(4, 4, 1),
    ParallelSplit(8, 8, 1),
    ParallelSplit(1, 8, 8),
    ParallelSplit(1, 16, 16),
    ParallelSplit(1, 32, 32),
)


@dataclass(frozen=True, slots=True)
class SplitBytes:
    """Stored weight bytes of the fullest rank; None = the split does not divide this model, `reason` says why."""

    split: ParallelSplit
    num_bytes: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InspectReport:
    """Result of an inspection. dtypes: safetensors dtype -> (tensors, bytes)."""

    title: str
    num_tensors: int
    num_bytes: int
    num_parameters: int  # main model and MTP, without scales and token-id tables
    num_mtp_parameters: int
    dtypes: Mapping[str, tuple[int, int]]
    splits: tuple[SplitBytes, ...]


def inspect_checkpoint(path: str | Path, *, splits: Sequence[ParallelSplit] = DEFAULT_SPLITS) -> InspectReport:
    """Inspect a checkpoint directory. Raises: CheckpointError when it does not open."""
    checkpoint = Checkpoint.open(path)
    stored = checkpoint.stored_tensors.values()
    return InspectReport(
        title=str(path),
        num_tensors=len(stored),
        num_bytes=sum(tensor.num_bytes for tensor in stored),
        splits=_splits(checkpoint.specs.values(), splits),
        dtypes=_histogram((tensor.dtype, tensor.num_bytes) for tensor in stored),
        **_parameters(checkpoint.specs.values()),
    )


def inspect_shape(name: str, *, splits: Sequence[ParallelSplit] = DEFAULT_SPLITS) -> InspectReport:
    """Inspect a shape preset in the official format. Raises: ConfigError for an unknown name."""
    specs = inventory(preset_config(name)).values()
    return InspectReport(
        title=f"shape {name}, official format",
        num_tensors=len(specs),
        num_bytes=sum(spec.num_bytes for spec in specs),
        splits=_splits((spec for spec in specs if spec.scale_of is None), splits),
        dtypes=_histogram((spec.dtype, spec.num_bytes) for spec in specs),
        **_parameters(specs),
    )


def bytes_per_rank(weights: Iterable[TensorSpec], split: ParallelSplit) -> int:
    """Stored bytes of the fullest rank: rank 0, as every split is even.

    weights: without scales; those that cover a rank's part are counted with it, a shared block on each of its ranks.
    Raises: ConfigError when the split does not divide the model.
    """
    total = 0
    for spec in weights:
        index = spec.owned_index(tp_size=split.tp, ep_size=split.ep)
        if index is not None:
            total += _num_bytes(index, spec.granule, DTYPE_BYTES[spec.dtype])
            if spec.scale_block is not None:
                total += _num_bytes(index, spec.scale_block, DTYPE_BYTES[spec.scale_dtype])
    return total


def render(report: InspectReport, console: Console) -> None:
    """Print a report as tables."""
    console.print(f"[bold]{report.title}[/bold]")
    console.print(f"{report.num_tensors:,} tensors, {report.num_bytes:,} bytes ({report.num_bytes / _GIB:,.2f} GiB)")
    main = report.num_parameters - report.num_mtp_parameters
    console.print(f"{main:,} parameters in the main model, {report.num_mtp_parameters:,} in the MTP module")
    console.print(_dtype_table(report))
    console.print(_split_table(report))


def _histogram(stored: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for dtype, num_bytes in stored:
        counts[dtype] += 1
        sizes[dtype] += num_bytes
    return {dtype: (counts[dtype], sizes[dtype]) for dtype in sorted(counts)}


def _parameters(specs: Iterable[TensorSpec]) -> dict[str, int]:
    counts = [(spec.num_parameters, spec.is_mtp) for spec in specs]
    return {
        "num_parameters": sum(count for count, _ in counts),
        "num_mtp_parameters": sum(count for count, is_mtp in counts if is_mtp),
    }


def _splits(weights: Iterable[TensorSpec], splits: Sequence[ParallelSplit]) -> tuple[SplitBytes, ...]:
    weights = list(weights)
    return tuple(_split_bytes(weights, split) for split in splits)


def _split_bytes(weights: list[TensorSpec], split: ParallelSplit) -> SplitBytes:
    try:
        return SplitBytes(split, bytes_per_rank(weights, split))
    except ConfigError as err:
        return SplitBytes(split, None, err.message)


def _num_bytes(index: tuple[slice, ...], granule: tuple[int, ...], element_bytes: int) -> int:
    count = element_bytes
    for part, step in zip(index, granule, strict=True):
        count *= -(-part.stop // step) - part.start // step
    return count


def _dtype_table(report: InspectReport) -> Table:
    table = Table("dtype", title="Stored dtypes", title_justify="left")
    for heading in ("tensors", "bytes"):
        table.add_column(heading, justify="right")
    for dtype, (count, num_bytes) in report.dtypes.items():
        table.add_row(dtype, f"{count:,}", f"{num_bytes:,}")
    return table


def _split_table(report: InspectReport) -> Table:
    table = Table(title="Weight bytes per rank", title_justify="left")
    for heading in ("TP", "EP", "DP", "ranks", "bytes per rank", "GiB"):
        table.add_column(heading, justify="right")
    for row in report.splits:
        split = row.split
        sizes = (
            (f"{row.num_bytes:,}", f"{row.num_bytes / _GIB:,.2f}") if row.num_bytes is not None else (row.reason, "-")
        )
        table.add_row(str(split.tp), str(split.ep), str(split.dp), str(split.num_ranks), *sizes)
    return table
