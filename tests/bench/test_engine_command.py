"""`dsv4 bench engine` on the toy checkpoint: what it measures, stores and compares. Nothing here asserts a speed."""

import json
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from dsv4_cluster.bench.engine_report import SCHEMA, read_baseline
from dsv4_cluster.cli.main import app

QUICK = (
    *("--prefill", "8,16", "--batch", "1,3", "--context", "5", "--prefix", "300", "--drafts", "0,1"),
    *("--steps", "2", "--repeats", "2", "--threads", "1"),
)


def _run(*args):
    return CliRunner().invoke(app, ["bench", "engine", *map(str, args)])


@pytest.fixture(scope="module")
def stored(toy_dir, tmp_path_factory):
    """One whole run: its stdout lines, parsed, and its directory."""
    out = tmp_path_factory.mktemp("bench")
    result = _run(toy_dir, *QUICK, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()], out


def test_the_first_line_says_what_was_measured_on_what(stored):
    run = stored[0][0]

    assert run["schema"] == SCHEMA
    assert run["hardware"]["num_cpus"] >= 1 and run["read_gb_per_s"] > 0
    assert (run["num_threads"], run["num_repeats"], run["num_warmup"], run["num_decode_steps"]) == (1, 2, 1, 2)
    assert run["dtype"] in ("float32", "bfloat16")
    assert run["shape"]["num_hidden_layers"] >= 1


def test_every_measurement_has_its_samples_median_and_spread(stored):
    lines = {line["key"]: line for line in stored[0][1:]}

    assert set(lines) >= {
        "prefill tokens=8",
        "prefill tokens=16",
        "decode batch=1 context=5",
        "decode batch=3 context=5",
        "prefix-cold tokens=300",
        "prefix-warm tokens=300",
        "prefix-speedup tokens=300",
        "speculation drafts=0",
    }
    for line in lines.values():
        assert len(line["samples"]) == 2 and min(line["samples"]) > 0
        assert line["median"] == pytest.approx(sum(line["samples"]) / 2)
        assert line["spread"] == pytest.approx((max(line["samples"]) - min(line["samples"])) / 2)


def test_speculation_is_measured_or_its_absence_explained(stored):
    run, *measurements = stored[0]
    is_measured = any(line["key"] == "speculation drafts=1" for line in measurements)

    assert is_measured != bool(run["unavailable"].get("speculation"))


def test_decode_says_how_much_of_the_memory_roof_it_reaches(stored):
    decode = [line for line in stored[0][1:] if line["name"] == "decode"]

    for line in decode:
        details, read_gb_per_s = line["details"], stored[0][0]["read_gb_per_s"]
        achieved = details["weight_mb_per_step"] / details["step_ms"]  # MB per ms = GB per s
        assert details["read_fraction"] == pytest.approx(achieved / read_gb_per_s)
    assert decode[0]["details"]["weight_mb_per_step"] < decode[1]["details"]["weight_mb_per_step"]


def test_only_the_second_asking_finds_the_prefix(stored):
    cached = {line["name"]: line["details"].get("cached_tokens") for line in stored[0][1:]}

    assert cached["prefix-cold"] == 0
    assert cached["prefix-warm"] == 256  # whole half pages of 128 tokens within the prefix of 300


def test_the_stored_files_are_a_page_and_a_baseline(stored, toy_dir):
    lines, out = stored

    ET.parse(out / "engine.html")
    assert list(read_baseline(out / "engine.jsonl")) == [line["key"] for line in lines[1:]]
    result = _run(toy_dir, "--parts", "prefill", "--prefill", "8", "--repeats", "1", "--baseline", out / "engine.jsonl")
    assert result.exit_code == 0, result.output
    assert "Against the baseline" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--parts", "prefill,other"), "unknown part 'other'"),
        (("--batch", "one"), "batch: 'one'"),
        (("--prefill", "0"), "prefill_lengths holds 0"),
        (("--repeats", "0"), "num_repeats is 0"),
        (("--dtype", "int8"), "dtype"),
        (("--baseline", "/nowhere/engine.jsonl"), "/nowhere/engine.jsonl"),
    ],
)
def test_wrong_input_is_one_clear_line(toy_dir, args, message):
    result = _run(toy_dir, *args)

    assert result.exit_code == 2
    assert message in result.stderr


def test_the_group_lists_its_commands():
    result = CliRunner().invoke(app, ["bench", "--help"])

    assert result.exit_code == 0
    assert "engine" in result.stdout and "serve" in result.stdout
