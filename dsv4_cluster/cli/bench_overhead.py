"""`dsv4 bench overhead`: the serving stack around an engine that costs nothing."""

import asyncio
import contextlib
import json
import socket
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4_cluster.cli.output import reports_errors

if TYPE_CHECKING:
    from dsv4_cluster.bench.overhead import OverheadResult

MODEL = "deepseek-v4"


@reports_errors
def overhead(
    streams: Annotated[int, typer.Option(help="Streams at the same time.", min=1, max=1024)] = 64,
    steps_per_s: Annotated[float, typer.Option(help="Steps of the scripted engine per second.", min=1)] = 50.0,
    duration: Annotated[float, typer.Option(help="Seconds that each stream lasts.", min=2)] = 20.0,
    through_proxy: Annotated[
        bool, typer.Option("--through-proxy", help="Go through Serve's own HTTP proxy, as `dsv4 serve` does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")] = False,
) -> None:
    """How many tokens per second one router delivers, and how late.

    Starts Ray with a router whose engines are scripted: they say one word per stream and step, on a fixed beat. HTTP
    front end, prompt encoding, output parsing, handles and subscriptions are the real ones. Latency is the time from
    the engine's step to the client's read, both on this machine's clock. The client speaks to the router's own port, as
    a load balancer in front does; --through-proxy measures the laptop set-up.

    Example: dsv4 bench overhead --streams 64 --steps-per-s 50
    """
    from dsv4_cluster.serve.environment import prepare_single_machine

    with tempfile.TemporaryDirectory(prefix="dsv4.", dir="/tmp") as directory:
        port = _free_port()
        # Before anything imports Ray.
        prepare_single_machine(ray_temp_dir=directory, replica_port=None if through_proxy else port)
        work = _measure(Path(directory), port, through_proxy, streams, steps_per_s, duration, not as_json)
        with contextlib.redirect_stdout(sys.stderr):  # Ray's own messages
            result = asyncio.run(work)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    share = result.delivered_rate / result.offered_rate
    print(f"{result.num_streams} streams, {result.num_tokens} tokens in {result.window_s:.1f} s")
    print(f"delivered {result.delivered_rate:,.0f} of {result.offered_rate:,.0f} tokens/s ({share:.1%})")
    print(
        f"engine to client: median {result.latency_p50_ms:.1f} ms, p99 {result.latency_p99_ms:.1f} ms, "
        f"largest {result.latency_max_ms:.1f} ms"
    )


async def _measure(
    directory: Path,
    port: int,
    through_proxy: bool,
    num_streams: int,
    steps_per_s: float,
    duration_s: float,
    shows_progress: bool,
) -> "OverheadResult":
    from rich.progress import Progress

    from dsv4_cluster.bench.overhead import run_streams, summarise
    from dsv4_cluster.config.cluster_config import ClusterConfig
    from dsv4_cluster.serve.scripted_run import scripted_cluster
    from dsv4_cluster.tools.presets import preset_config, preset_json
    from dsv4_cluster.tools.tokenizer_files import write_tokenizer

    (directory / "config.json").write_text(json.dumps(preset_json("flash")))
    write_tokenizer(directory, preset_config("flash").vocab_size)
    config = ClusterConfig.model_validate({"model": {"path": str(directory), "served_names": [MODEL]}})
    tokens = int(duration_s * steps_per_s)
    async with scripted_cluster(config, steps_per_s=steps_per_s, port=port if through_proxy else None) as spoken:
        url = f"http://127.0.0.1:{port}"
        await run_streams(url, MODEL, 2, 10, lambda _: None)  # connections, imports and code paths are warm
        with Progress(disable=not shows_progress, transient=True) as progress:
            task = progress.add_task("streaming", total=num_streams * tokens)
            logs = await run_streams(url, MODEL, num_streams, tokens, lambda n: progress.advance(task, n))
        first_steps, step_times_s = await spoken()
    return summarise(logs, first_steps, step_times_s, steps_per_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
