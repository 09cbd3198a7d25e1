"""`dsv4 bench kernels`: the GPU kernels against the roofs of this machine."""

from pathlib import Path
from typing import Annotated

import typer


def kernels(
    words: Annotated[list[str] | None, typer.Argument(help="Only cases whose name contains one of these.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Earlier JSON file to compare with.", exists=True)] = None,
    variants_until: Annotated[float, typer.Option(help="Seconds after which no candidate is started.")] = 1e9,
) -> None:
    """Time every op's cases on the GPU; the last column says whether a case reaches its target."""
    import torch

    from dsv4_kernels.benchmark import run_benchmarks

    if not torch.cuda.is_available():
        typer.echo("bench kernels needs a CUDA GPU; torch sees none", err=True)
        raise typer.Exit(2)
    raise typer.Exit(run_benchmarks(words or [], out, baseline, variants_until))
