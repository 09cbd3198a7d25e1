"""`dsv4 bench compare-transformers` on the toy checkpoint: what it prints. Nothing here asserts a speed."""

import json

import pytest
from typer.testing import CliRunner

from dsv4_cluster.cli.main import app

QUANTITIES = ["prefill_40", "decode_b1", "decode_b8"]


@pytest.fixture(scope="module")
def stdout(checkpoint_dir) -> str:
    quick = ("--prefill", "40", "--context", "12", "--steps", "2", "--rounds", "1", "--threads", "1")
    result = CliRunner().invoke(
        app, ["bench", "compare-transformers", "--checkpoint", str(checkpoint_dir("toy", "bf16")), *quick, "--json"]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_stdout_is_one_json_object_with_positive_ratios(stdout):
    report = json.loads(stdout)

    assert list(report["ratios"]) == QUANTITIES
    assert all(ratio > 0 for ratio in report["ratios"].values())


def test_a_ratio_is_their_median_over_ours(stdout):
    report = json.loads(stdout)

    for name in QUANTITIES:
        measured = report["measurements"][name]
        assert len(measured["ours_rounds_s"]) == len(measured["transformers_rounds_s"]) == 1
        assert report["ratios"][name] == pytest.approx(measured["transformers_s"] / measured["ours_s"], abs=1e-3)


def test_neither_a_preset_nor_a_checkpoint_is_an_error():
    result = CliRunner().invoke(app, ["bench", "compare-transformers", "--json"])

    assert result.exit_code != 0
    assert "--preset or --checkpoint" in result.output
