"""`dsv4 bench serve`: load on an HTTP endpoint."""

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dsv4_cluster.cli.output import reports_errors
from dsv4_cluster.errors import ConfigError

if TYPE_CHECKING:
    from dsv4_cluster.bench.client import Endpoint
    from dsv4_cluster.bench.compare import Metric
    from dsv4_cluster.bench.load import LoadSpec
    from dsv4_cluster.bench.serve import ServeRun
    from dsv4_cluster.bench.serve_report import ServeReport

N = TypeVar("N", int, float)

_LOAD, _WORK, _OUT = "Load", "Workload", "Output"


@reports_errors
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Root of the server, like http://127.0.0.1:8000.")],
    concurrency: Annotated[
        str, typer.Option(help="Closed loop: users at a time; a list like 1,4,16 is a sweep.", rich_help_panel=_LOAD)
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Open loop: requests per second on average; a list is a sweep.", rich_help_panel=_LOAD)
    ] = "",
    burstiness: Annotated[
        float, typer.Option(help="1 = Poisson arrivals, above: more regular, below: bursts.", rich_help_panel=_LOAD)
    ] = 1.0,
    duration: Annotated[
        float | None, typer.Option(help="Start no request after so many seconds.", rich_help_panel=_LOAD)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds one answer may take.", rich_help_panel=_LOAD)] = 600.0,
    warmup: Annotated[int, typer.Option(help="Requests before the first load point.", rich_help_panel=_LOAD)] = 8,
    workload: Annotated[
        str, typer.Option(help="fixed, random, shared-prefix or multi-turn.", rich_help_panel=_WORK)
    ] = "random",
    num_requests: Annotated[int, typer.Option(help="Per load point, turns counted.", rich_help_panel=_WORK)] = 64,
    input_tokens: Annotated[int, typer.Option(help="Words of new text per request.", rich_help_panel=_WORK)] = 512,
    output_tokens: Annotated[int, typer.Option(help="Most tokens per answer.", rich_help_panel=_WORK)] = 64,
    range_ratio: Annotated[
        float, typer.Option(help="random: shortest length as a fraction of the longest.", rich_help_panel=_WORK)
    ] = 0.8,
    prefix_tokens: Annotated[int, typer.Option(help="Words of shared prefix.", rich_help_panel=_WORK)] = 0,
    num_prefixes: Annotated[int, typer.Option(help="Different shared prefixes.", rich_help_panel=_WORK)] = 1,
    num_turns: Annotated[int, typer.Option(help="multi-turn: turns of a conversation.", rich_help_panel=_WORK)] = 4,
    think_time: Annotated[
        float, typer.Option(help="multi-turn: seconds between an answer and the next turn.", rich_help_panel=_WORK)
    ] = 0.0,
    api: Annotated[
        str, typer.Option(help="chat (encoded by the server) or completions (raw text).", rich_help_panel=_WORK)
    ] = "chat",
    model: Annotated[
        str | None, typer.Option(help="Served name; default: the first one listed.", rich_help_panel=_WORK)
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of every request.", rich_help_panel=_WORK)] = 1.0,
    extra_body: Annotated[
        str, typer.Option(help='JSON object added to every request, e.g. {"ignore_eos": true}.', rich_help_panel=_WORK)
    ] = "{}",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File that holds the bearer token.", rich_help_panel=_WORK)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and sampling.", rich_help_panel=_WORK)] = 0,
    text_seed: Annotated[
        int | None, typer.Option(help="Of the words; fresh by default, so no old cache helps.", rich_help_panel=_WORK)
    ] = None,
    slo: Annotated[
        str, typer.Option(help="Limits for goodput in ms, like ttft:2000,tpot:50,e2e:30000.", rich_help_panel=_OUT)
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Directory for report.html, report.json, requests.jsonl.", rich_help_panel=_OUT)
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="A report.json to compare with.", rich_help_panel=_OUT)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The report as JSON on stdout.", rich_help_panel=_OUT)
    ] = False,
) -> None:
    """Load an OpenAI-compatible endpoint and report latencies, throughput and goodput.

    Closed loop (--concurrency) is the default, with one user. Exit code 1 when no request at all was answered.

    Examples:

      dsv4 bench serve http://127.0.0.1:8000 --concurrency 1,4,16 --out results/first

      dsv4 bench serve http://127.0.0.1:8000 --rate 2 --duration 60 --slo ttft:2000,tpot:50

      dsv4 bench serve http://127.0.0.1:8000 --workload multi-turn --num-turns 6 --prefix-tokens 1024
    """
    from dsv4_cluster.bench.load import LoadSpec
    from dsv4_cluster.bench.serve import ServeRun
    from dsv4_cluster.bench.serve_report import read_baseline
    from dsv4_cluster.bench.serve_summary import SLO
    from dsv4_cluster.bench.workload import WorkloadSpec

    before = None if baseline is None else read_baseline(baseline)
    spec = WorkloadSpec(
        kind=_one_of("workload", workload, ("fixed", "random", "shared-prefix", "multi-turn")),  # type: ignore[arg-type]
        num_requests=num_requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        range_ratio=range_ratio,
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
        num_turns=num_turns,
        seed=seed,
        text_seed=secrets.randbits(31) if text_seed is None else text_seed,
    )
    common = LoadSpec(
        concurrency=1,
        burstiness=burstiness,
        duration_s=duration,
        think_time_s=think_time,
        temperature=temperature,
        seed=seed,
    )
    limits = SLO.parse(slo)
    loads = _loads(concurrency, rate, common)
    endpoint = _endpoint(url, api, model, timeout, api_key_file, extra_body)
    run = ServeRun(endpoint=endpoint, workload=spec, loads=loads, slo=limits, num_warmup=warmup)
    report = _run(run, out)
    _finish(report, out, before, as_json=as_json)


def _endpoint(
    url: str, api: str, model: str | None, timeout_s: float, api_key_file: Path | None, extra_body: str
) -> "Endpoint":
    """Without a model the server is asked for its first one. Raises: ConfigError."""
    from dsv4_cluster.bench.client import Endpoint
    from dsv4_cluster.bench.serve import find_model

    base_url = url.rstrip("/").removesuffix("/v1")
    api_key = None if api_key_file is None else _read_key(api_key_file)
    extra = _json_object(extra_body)
    known_api = _one_of("api", api, ("chat", "completions"))
    return Endpoint(
        base_url=base_url,
        api=known_api,  # type: ignore[arg-type]  # checked above
        model=model or asyncio.run(find_model(base_url, api_key)),
        timeout_s=timeout_s,
        api_key=api_key,
        extra_body=extra,
    )


def _run(run: "ServeRun", out: Path | None) -> "ServeReport":
    """Measure with a live display on stderr."""
    from dsv4_cluster.bench.serve import run_serve
    from dsv4_cluster.cli.bench_display import ServeDisplay
    from dsv4_cluster.clock import MonotonicClock

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with ServeDisplay(None if out is None else out / "requests.jsonl") as display:
        return asyncio.run(run_serve(run, MonotonicClock(), display))


def _finish(report: "ServeReport", out: Path | None, before: "dict[str, Metric] | None", *, as_json: bool) -> None:
    """Store, print and compare. Raises: typer.Exit when nothing was answered."""
    from rich.console import Console

    from dsv4_cluster.bench.compare import compare
    from dsv4_cluster.bench.serve_page import render_page, warnings
    from dsv4_cluster.cli.bench_display import point_table
    from dsv4_cluster.cli.bench_tables import comparison_table

    comparison = None if before is None else compare(before, report.metrics)
    if out is not None:  # first of all: a long run must not be lost to a failure further down
        (out / "report.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    console = Console(stderr=as_json)
    if as_json:
        print(json.dumps(report.to_dict()))
    console.print(point_table(report.points))
    for line in warnings(report):
        console.print(line, style="yellow")
    if comparison is not None:
        console.print(comparison_table(comparison))
    if out is not None:
        (out / "report.html").write_text(render_page(report, comparison), encoding="utf-8")
        console.print(f"report: {out / 'report.html'}")
    if all(point.num_ok == 0 for point in report.points):
        raise typer.Exit(1)


def _loads(concurrency: str, rate: str, common: "LoadSpec") -> "tuple[LoadSpec, ...]":
    """One load point per listed value, one user when nothing is given. Raises: ConfigError."""
    if concurrency and rate:
        raise ConfigError("give either --concurrency (closed loop) or --rate (open loop)")
    if rate:
        return tuple(replace(common, concurrency=None, rate=value) for value in _numbers("rate", rate, float))
    return tuple(replace(common, concurrency=n) for n in _numbers("concurrency", concurrency or "1", int))


def _numbers(name: str, text: str, kind: Callable[[str], N]) -> list[N]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as err:
        raise ConfigError(f"{name}: {text!r} is not a list of numbers like 1,4,16") from err


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as err:
        raise ConfigError(f"api_key_file {path}: {err.strerror}") from err


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
    return value


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as err:
        raise ConfigError(f"extra_body is not JSON: {err}") from err
    if not isinstance(value, dict):
        raise ConfigError("extra_body must be a JSON object")
    return value
