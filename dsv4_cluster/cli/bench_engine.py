"""`dsv4 bench engine`: the engine in this process, without Ray or HTTP."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4_cluster.cli.output import reports_errors
from dsv4_cluster.errors import ConfigError

if TYPE_CHECKING:
    from dsv4_cluster.bench.compare import Metric
    from dsv4_cluster.bench.engine import EngineBench, Part
    from dsv4_cluster.bench.engine_report import EngineRun, Measurement


@reports_errors
def engine(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint directory.")],
    parts: Annotated[
        str, typer.Option(help="Some of prefill, decode, prefix, speculation.")
    ] = "prefill,decode,prefix,speculation",
    prefill: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "128,512,2048",
    batch: Annotated[str, typer.Option(help="Decode batch sizes.")] = "1,4,8",
    context: Annotated[str, typer.Option(help="Prompt tokens in front of the decoded ones.")] = "128,2048",
    prefix: Annotated[int, typer.Option(help="Tokens of the prefix that is asked twice.")] = 2560,
    drafts: Annotated[str, typer.Option(help="Drafted tokens per step.")] = "0,1,2,3,4",
    steps: Annotated[int, typer.Option(help="Decode steps per sample.")] = 16,
    repeats: Annotated[int, typer.Option(help="Samples per measurement.")] = 5,
    warmup: Annotated[int, typer.Option(help="Samples that are thrown away first.", min=0)] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (exact) or fp8.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch; default: torch's own choice.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    baseline: Annotated[Path | None, typer.Option(help="An engine.jsonl to compare with.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for engine.jsonl and engine.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines on stdout, and nothing else there.")] = False,
) -> None:
    """Measure prefill, decode, prefix hits and speculation of a checkpoint.

    Decode results carry the fraction of the measured memory read bandwidth that their weight reads amount to.

    Examples:

      dsv4 bench engine checkpoints/tiny --out results/today

      dsv4 bench engine checkpoints/tiny --parts decode --baseline results/yesterday/engine.jsonl
    """
    import torch
    from pydantic import ValidationError

    from dsv4_cluster.bench.engine import EngineBench
    from dsv4_cluster.bench.engine_report import read_baseline

    before = None if baseline is None else read_baseline(baseline)
    bench = EngineBench(
        checkpoint=checkpoint,
        parts=_parts(parts),
        prefill_lengths=_integers("prefill", prefill),
        decode_batches=_integers("batch", batch),
        decode_contexts=_integers("context", context),
        prefix_tokens=prefix,
        draft_counts=_integers("drafts", drafts),
        num_decode_steps=steps,
        num_repeats=repeats,
        num_warmup=warmup,
        dtype=dtype,  # type: ignore[arg-type]  # EngineConfig refuses others
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]  # KVConfig refuses others
        device=device,
        num_threads=threads or torch.get_num_threads(),
        seed=seed,
    )
    try:
        run, measurements = _measure(bench)
    except ValidationError as err:
        raise ConfigError("; ".join(f"{e['loc'][0]}: {e['msg']}" for e in err.errors())) from err
    _finish(run, measurements, out, before, as_json=as_json)


def _measure(bench: "EngineBench") -> "tuple[EngineRun, list[Measurement]]":
    """Run with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dsv4_cluster.bench.charts import number
    from dsv4_cluster.bench.engine import run_engine

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=bench.num_measurements)

        def show(measurement: "Measurement") -> None:
            text = f"{measurement.key}: {number(measurement.summary.p50)} {measurement.unit}"
            progress.update(task, advance=1, description=text)

        return run_engine(bench, show)


def _finish(
    run: "EngineRun",
    measurements: "list[Measurement]",
    out: Path | None,
    before: "dict[str, Metric] | None",
    *,
    as_json: bool,
) -> None:
    from rich.console import Console

    from dsv4_cluster.bench.compare import compare
    from dsv4_cluster.bench.engine_page import render_page
    from dsv4_cluster.bench.engine_report import engine_metrics, to_lines
    from dsv4_cluster.cli.bench_tables import comparison_table, measurement_table

    comparison = None if before is None else compare(before, engine_metrics(measurements))
    lines = to_lines(run, measurements)
    if out is not None:  # first of all: a long run must not be lost to a failure further down
        out.mkdir(parents=True, exist_ok=True)
        (out / "engine.jsonl").write_text(lines, encoding="utf-8")
    console = Console(stderr=as_json)
    if as_json:
        print(lines, end="")
    console.print(measurement_table(measurements))
    for part, reason in run.unavailable.items():
        console.print(f"{part}: not measured. {reason}", style="yellow")
    if comparison is not None:
        console.print(comparison_table(comparison))
    if out is not None:
        (out / "engine.html").write_text(render_page(run, measurements, comparison), encoding="utf-8")
        console.print(f"report: {out / 'engine.html'}")


def _parts(text: str) -> "tuple[Part, ...]":
    from dsv4_cluster.bench.engine import PARTS

    by_name: dict[str, Part] = {part: part for part in PARTS}
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name not in by_name]
    if unknown:
        raise ConfigError(f"parts: unknown part {unknown[0]!r}, expected some of {', '.join(PARTS)}")
    return tuple(by_name[name] for name in asked)


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as err:
        raise ConfigError(f"{name}: {text!r} is not a list of integers like 1,4,16") from err
