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
) -> None:
    """Show what a checkpoint consists of: tensors, dtypes, bytes, parameters, bytes per rank of usual splits.

    Examples: dsv4 inspect checkpoints/tiny; dsv4 inspect --shape flash
    """
    from rich.console import Console

    from dsv4_cluster.tools.inspect import inspect_checkpoint, inspect_shape, render

    if (checkpoint is None) == (shape is None):
        raise ConfigError("give either a checkpoint directory or --shape")
    report = inspect_shape(shape) if shape is not None else inspect_checkpoint(checkpoint or Path())
    render(report, Console())
