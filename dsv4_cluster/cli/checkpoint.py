"""`dsv4 make-checkpoint` and `dsv4 inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4_cluster.cli.output import reports_errors
from dsv4_cluster.errors import ConfigError


@reports_errors
def make_checkpoint(
    preset: Annotated[str, typer.Option(help="Shape: toy (for tests), tiny or medium.")],
    out: Annotated[Path, typer.Option(help="Directory to write; left alone when it holds this checkpoint already.")],
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    fmt: Annotated[
        str, typer.Option("--format", help="official (FP8, packed FP4 experts) or bf16; equal values in both.")
    ] = "official",
) -> None:
    """Write a checkpoint with random weights, real tensor names and formats, and tokenizer files.

    Example: dsv4 make-checkpoint --preset tiny --out checkpoints/tiny
    """
    from rich.console import Console

    from dsv4_cluster.tools import make_checkpoint as tool

    # The tool refuses an unknown format by name.
    made = tool.make_checkpoint(preset, out, seed=seed, fmt=fmt, console=Console())  # type: ignore[arg-type]
    print(f"made {made.path}" if made.created else f"{made.path} is there already")


@reports_errors
def inspect(
    checkpoint: Annotated[Path | None, typer.Argument(metavar="[CHECKPOINT]", help="Checkpoint directory.")] = None,
    shape: Annotated[str | None, typer.Option(help="A shape instead of a directory: flash, pro, ...")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the split to show.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that the routed experts are spread over.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel attention replicas.")] = 1,
) -> None:
    """Show what a checkpoint consists of: tensors, dtypes, bytes, parameters, bytes per rank of a split.

    Without --tp, --ep and --dp the usual splits are listed.

    Examples: dsv4 inspect checkpoints/tiny; dsv4 inspect --shape flash --tp 8 --ep 8
    """
    from rich.console import Console

    from dsv4_cluster.tools.inspect import DEFAULT_SPLITS, ParallelSplit, inspect_checkpoint, inspect_shape, render

    if (checkpoint is None) == (shape is None):
        raise ConfigError("give either a checkpoint directory or --shape")
    asked = ParallelSplit(tp, ep, dp)
    splits = DEFAULT_SPLITS if asked.num_ranks == asked.ep == 1 else (asked,)
    if shape is not None:
        report = inspect_shape(shape, splits=splits)
    else:
        report = inspect_checkpoint(checkpoint or Path(), splits=splits)
    render(report, Console())
