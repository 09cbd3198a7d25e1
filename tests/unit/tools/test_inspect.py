"""The inspector's numbers are the inventory's and the files' own."""

import io

import pytest
from rich.console import Console

from dsv4_cluster.errors import CheckpointError, ConfigError
from dsv4_cluster.tools.inspect import ParallelSplit, bytes_per_rank, inspect_checkpoint, inspect_shape, render
from dsv4_cluster.tools.presets import preset_config
from dsv4_cluster.weights.inventory import inventory

TOTALS = {"flash": (69_187, 159_609_485_896), "pro": (145_116, 864_704_792_696)}


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_shape_report_reproduces_the_published_totals(name):
    report = inspect_shape(name)

    assert (report.num_tensors, report.num_bytes) == TOTALS[name]
    assert sum(count for count, _ in report.dtypes.values()) == report.num_tensors
    assert sum(num_bytes for _, num_bytes in report.dtypes.values()) == report.num_bytes
    assert report.splits[0].num_bytes == report.num_bytes


def test_directory_report_equals_the_shape_report(toy_dir):
    made, shape = inspect_checkpoint(toy_dir), inspect_shape("toy")

    assert made.dtypes == shape.dtypes
    assert (made.num_parameters, made.num_mtp_parameters) == (shape.num_parameters, shape.num_mtp_parameters)
    assert made.splits == shape.splits


def test_expert_parallel_ranks_share_the_experts_and_repeat_the_rest():
    weights = [spec for spec in inventory(preset_config("flash")).values() if spec.scale_of is None]
    whole = bytes_per_rank(weights, ParallelSplit(1, 1, 1))
    experts = bytes_per_rank([spec for spec in weights if spec.expert_id is not None], ParallelSplit(1, 1, 1))

    per_rank = bytes_per_rank(weights, ParallelSplit(tp=1, ep=8, dp=8))

    assert per_rank == whole - experts + experts // 8


def test_split_that_does_not_divide_says_why():
    (row,) = inspect_shape("toy", splits=[ParallelSplit(8, 8, 1)]).splits

    assert row.num_bytes is None
    assert "attn" in row.reason and "does not divide over 8 tp ranks" in row.reason


def test_render_prints_the_totals():
    console = Console(file=io.StringIO(), width=140)

    render(inspect_shape("flash"), console)

    text = console.file.getvalue()
    assert "69,187 tensors, 159,609,485,896 bytes" in text
    assert "F8_E8M0" in text and "34,167" in text


def test_unknown_shape_and_empty_directory_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown shape preset"):
        inspect_shape("huge")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        inspect_checkpoint(tmp_path)
