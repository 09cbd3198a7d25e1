"""`python -m dsv4_kernels.benchmark`: times the cases of all ops on this machine's GPU.

One CUDA graph holds a run with every input set and is replayed, so that the host's launch gaps and a warm L2 stay out
of the numbers. The first line measures this machine's own roofs, and every fraction refers to them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dsv4_kernels import peers
from dsv4_kernels.bench_case import KernelCase

_WARM_ROUNDS = 2
_MIN_ROUNDS, _MAX_ROUNDS = 5, 50
_SECONDS_PER_VARIANT = 0.25
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed variant of one case."""

    name: str
    shape: str
    variant: str
    median_us: float
    low_us: float  # fastest and slowest round
    high_us: float
    rate: float  # bytes/s or FLOP/s, by the case's roof
    fraction: float  # of the roof; for "microseconds" target / time
    verdict: str  # "stretch", "target", "below"
    roof: str
    is_peer: bool = False  # a kernel of another library
    is_part: bool = False  # a piece of what our op does
    lacks: str = ""  # what it does not do of what our op does


@dataclass(frozen=True, slots=True)
class Failure:
    """A variant that did not run, or a peer that computes something else."""

    text: str
    is_peer: bool  # no fault of ours


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our op and a kernel of another library, timed in one run."""

    name: str
    shape: str
    winner: str  # "ours", or the peer's row
    ours_us: float
    peer: str
    peer_us: float
    lacks: str  # what the peer does not do


def find_cases(wanted: Sequence[str] = ()) -> list[KernelCase]:
    """Cases of every `bench.py` below this package whose name contains one of the words; all without words."""
    root = Path(__file__).parent
    modules = sorted(".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("bench.py"))
    cases = [case for module in modules for case in import_module(f"dsv4_kernels.{module}").cases()]
    return [case for case in cases if not wanted or any(word in case.name for word in wanted)]


def measure_roofs(device: torch.device) -> dict[str, float]:
    """Bytes/s of a copy, bf16 and FP8 FLOP/s of the library's 8192^3 products, on random data."""
    size = 8192
    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    fp8 = lambda: torch._scaled_mm(a8, b8.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    flops = 2.0 * size**3
    return {
        "bandwidth": 2.0 * source.numel() * 4 / _median_seconds([lambda: target.copy_(source)]),
        "bf16": flops / _median_seconds([lambda: a @ b]),
        "fp8": flops / _median_seconds([fp8]),
    }


def run_case(
    case: KernelCase,
    roofs: dict[str, float],
    device: torch.device,
    *,
    with_variants: bool,
    libraries: Mapping[str, Any],
) -> Iterator[Measurement | Failure]:
    """Time `run`, the variants of one case, and its peers among `libraries`."""
    inputs = case.make_inputs(device, torch.Generator(device=device).manual_seed(0))
    calls = {"run": case.run, **(case.variants if with_variants else {})}
    for name, call in calls.items():
        try:
            rounds = _time(call, inputs)
        except Exception as error:  # a candidate may ask for more registers or shared memory than there are
            yield _failure(case, name, error, is_peer=False)
            continue
        yield _measurement(case, name, rounds, roofs)
    for name, peer in case.peers.items():
        library = libraries[peer.library]
        if isinstance(library, peers.Absence):
            continue
        try:
            rounds = _time(lambda call: call.run(), peers.prepare(peer, library, inputs, case.run(inputs[0])))
        except Exception as error:  # a library has limits of its own, and errors of its own
            yield _failure(case, name, error, is_peer=True)
            continue
        yield replace(_measurement(case, name, rounds, roofs), is_peer=True, is_part=peer.is_part, lacks=peer.lacks)


def compare(results: Sequence[Measurement]) -> list[Comparison]:
    """What the op runs against each peer of one case that was timed and does the whole of it."""
    ours = next((one for one in results if one.variant == "run"), None)
    return [_comparison(ours, one) for one in results if ours and one.is_peer and not one.is_part]


def _comparison(ours: Measurement, peer: Measurement) -> Comparison:
    winner = "ours" if ours.median_us <= peer.median_us else peer.variant
    return Comparison(ours.name, ours.shape, winner, ours.median_us, peer.variant, peer.median_us, peer.lacks)


def _failure(case: KernelCase, variant: str, error: Exception, *, is_peer: bool) -> Failure:
    return Failure(f"{case.name}, {case.shape}, {variant}: {type(error).__name__}: {str(error)[:200]}", is_peer)


def _measurement(case: KernelCase, variant: str, rounds: list[float], roofs: dict[str, float]) -> Measurement:
    middle = median(rounds)
    rate, fraction = _rate(case, middle, roofs)
    verdict = "stretch" if _reaches(case, fraction, case.stretch_fraction) else "below"
    if verdict == "below" and _reaches(case, fraction, case.target_fraction):
        verdict = "target"
    times = (middle * _MICRO, min(rounds) * _MICRO, max(rounds) * _MICRO)
    return Measurement(case.name, case.shape, variant, *times, rate, fraction, verdict, case.roof)


def _rate(case: KernelCase, seconds: float, roofs: dict[str, float]) -> tuple[float, float]:
    if case.roof == "microseconds":
        return case.bytes_moved / seconds, case.target_fraction / (seconds * _MICRO)
    rate = (case.bytes_moved if case.roof == "bandwidth" else case.flops) / seconds
    return rate, rate / roofs[case.roof]


def _reaches(case: KernelCase, fraction: float, limit: float) -> bool:
    if case.roof == "microseconds":
        return fraction >= case.target_fraction / limit
    return fraction >= limit


def _time(call: Callable[[Any], Any], inputs: list[Any]) -> list[float]:
    """Seconds of one run in each round; a round replays the graph of every input set once."""
    torch.cuda.synchronize()  # the side stream does not wait for the inputs by itself
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for one in inputs:
            kept.append(call(one))
    return [seconds / len(inputs) for seconds in _rounds(graph.replay)]


def _rounds(replay: Callable[[], Any]) -> list[float]:
    for _ in range(_WARM_ROUNDS):
        replay()
    first = _seconds(replay)
    count = int(min(_MAX_ROUNDS, max(_MIN_ROUNDS, _SECONDS_PER_VARIANT / max(first, 1e-6))))
    return [_seconds(replay) for _ in range(count)]


def _median_seconds(calls: list[Callable[[], Any]]) -> float:
    return median(_rounds(lambda: [call() for call in calls]))


def _seconds(replay: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dsv4_kernels.benchmark", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("words", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--out", type=Path, help="JSON file for the results, rewritten after every case")
    parser.add_argument("--baseline", type=Path, help="earlier JSON file to compare with")
    parser.add_argument(
        "--variants-until", type=float, default=float("inf"), help="seconds after which none is started"
    )
    options = parser.parse_args(arguments)
    return run_benchmarks(options.words, options.out, options.baseline, options.variants_until)


def run_benchmarks(words: Sequence[str], out: Path | None, baseline: Path | None, variants_until_s: float) -> int:
    """Time the chosen cases and print a line for each. Returns: 1 when one of ours failed to run, else 0."""
    started = time.monotonic()
    device = torch.device("cuda")
    roofs = measure_roofs(device)
    say(
        f"{torch.cuda.get_device_name()}: copy {roofs['bandwidth'] / 1e12:.2f} TB/s, "
        f"bf16 {roofs['bf16'] / 1e12:.0f} and fp8 {roofs['fp8'] / 1e12:.0f} TFLOP/s"
    )
    libraries = peers.find_libraries()
    say(peers.describe(libraries))
    before = _load_baseline(baseline)
    results: list[Measurement] = []
    comparisons: list[Comparison] = []
    failures: list[Failure] = []
    cases = find_cases(words)
    for index, case in enumerate(cases):
        say(f"[{index + 1}/{len(cases)}, {time.monotonic() - started:.0f} s] {case.name}: {case.shape}")
        with_variants = time.monotonic() - started < variants_until_s
        first = len(results)
        for one in run_case(case, roofs, device, with_variants=with_variants, libraries=libraries):
            if isinstance(one, Failure):
                failures.append(one)
                say(f"FAILED {one.text}")
                continue
            results.append(one)
            say(format_row(one, before.get((one.name, one.shape, one.variant))))
        for comparison in compare(results[first:]):
            comparisons.append(comparison)
            say(format_comparison(comparison))
        torch.cuda.empty_cache()
        if out:
            report = {
                "roofs": roofs,
                "libraries": peers.describe(libraries),
                "results": [asdict(one) for one in results],
                "comparisons": [asdict(one) for one in comparisons],
                "failures": [one.text for one in failures],
            }
            out.write_text(json.dumps(report, indent=1))
    if comparisons:
        say(format_score(comparisons))
    return 1 if any(not one.is_peer for one in failures) else 0


def format_row(one: Measurement, baseline_us: float | None) -> str:
    """One line of the table; with a baseline the ratio new / old time."""
    unit = 1e12
    rate = (
        f"{one.rate / unit:7.2f} TB/s" if one.roof in ("bandwidth", "microseconds") else f"{one.rate / unit:7.0f} TF/s"
    )
    change = f"  {one.median_us / baseline_us:5.2f} x baseline" if baseline_us else ""
    part = f"  a part: without {one.lacks}" if one.is_part else ""
    return (
        f"{one.name:24} {one.shape:44} {one.variant:28} {one.median_us:10.1f} us "
        f"[{one.low_us:.1f}, {one.high_us:.1f}] {rate} {one.fraction:6.1%} {one.verdict}{change}{part}"
    )


def format_comparison(one: Comparison) -> str:
    """The line that says who wins, by which factor, and what the peer's time does not hold."""
    factor = max(one.ours_us, one.peer_us) / min(one.ours_us, one.peer_us)
    return (
        f"{one.name:24} {one.shape:44} ours {one.ours_us:.1f} us, {one.peer} {one.peer_us:.1f} us: "
        f"{one.winner} wins, {factor:.2f} x" + (f" ({one.peer} without {one.lacks})" if one.lacks else "")
    )


def format_score(comparisons: Sequence[Comparison]) -> str:
    """The last line: in how many comparisons our op is the faster one."""
    won = sum(one.winner == "ours" for one in comparisons)
    return f"ours wins {won} of {len(comparisons)} comparisons with other libraries"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _load_baseline(path: Path | None) -> dict[tuple[str, str, str], float]:
    if path is None:
        return {}
    rows = json.loads(path.read_text())["results"]
    return {(row["name"], row["shape"], row["variant"]): row["median_us"] for row in rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
