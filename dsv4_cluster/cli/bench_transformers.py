"""`dsv4 bench compare-transformers`: this engine against the transformers library on the same checkpoint."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dsv4_cluster.cli.output import reports_errors
from dsv4_cluster.errors import ConfigError


@reports_errors
def compare_transformers(
    preset: Annotated[str | None, typer.Option(help="Shape preset; its checkpoint is made for the run.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint directory to use instead.")] = None,
    rounds: Annotated[int, typer.Option(help="Alternating rounds per quantity, after one warm-up.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads of both sides.", min=1)] = 2,
    prefill: Annotated[int, typer.Option(help="Prompt tokens of the prefill measurement.", min=1)] = 2048,
    context: Annotated[int, typer.Option(help="Prompt tokens in front of the decoded ones.", min=1)] = 512,
    steps: Annotated[int, typer.Option(help="Decode steps per round; their median counts.", min=1)] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")] = False,
) -> None:
    """Prefill and decode at batch 1 and 8 against transformers, both in bf16 on CPU.

    transformers is part of the `dev` extra. Both sides run in this process, in turns, on the same tokens.

    Example: dsv4 bench compare-transformers --preset tiny --json
    """
    from dsv4_cluster.bench.compare_transformers import Workload
    from dsv4_cluster.bench.compare_transformers import compare_transformers as compare
    from dsv4_cluster.tools.make_checkpoint import make_checkpoint

    if (preset is None) == (checkpoint is None):
        raise ConfigError("give either --preset or --checkpoint")
    workload = Workload(
        prefill_tokens=prefill, decode_context=context, decode_tokens=steps, rounds=rounds, num_threads=threads
    )
    with tempfile.TemporaryDirectory(prefix="dsv4-compare-") as made:
        if preset is not None:
            checkpoint = make_checkpoint(preset, Path(made) / preset, fmt="bf16").path
        assert checkpoint is not None
        result = compare(checkpoint, workload)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    print(f"{'':<16}{'ours':>12}{'transformers':>16}{'ratio':>9}")
    for name, measured in result.measurements.items():
        times = f"{measured.ours_s * 1e3:>9.1f} ms{measured.transformers_s * 1e3:>13.1f} ms"
        print(f"{name:<16}{times}{measured.ratio:>8.2f}x")
