"""Choosing an implementation: pure, and errors name what exists."""

import pytest
import torch

from dsv4_kernels.__main__ import table
from dsv4_kernels.dispatch import UnknownImplementationError, choose, implementation, implementations, why_not
from dsv4_kernels.native.library import is_available
from dsv4_kernels.norm import rms_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", ["attention", "compressor", "indexer", "mhc", "moe", "norm", "quant", "rope"])
def test_every_op_has_a_reference(op):
    assert choose(op, CPU, torch.float32, "reference") == "reference"
    assert choose(op, CPU, torch.float64) == "reference"


def test_the_c_kernels_are_chosen_for_bf16_exactly_where_they_can_run():
    expected = "native" if is_available(CPU, torch.bfloat16) else "reference"

    assert choose("norm", CPU, torch.bfloat16) == choose("moe", CPU, torch.float32) == expected
    assert choose("norm", torch.device("meta"), torch.bfloat16) == "reference"


@pytest.mark.parametrize("op", ["attention", "gemm", "indexer", "mhc", "norm", "rope"])
def test_fp32_activations_go_to_the_references(op):
    assert choose(op, CPU, torch.float32) == "reference"


def test_unknown_implementation_lists_what_exists():
    with pytest.raises(
        UnknownImplementationError, match="'norm' has no implementation 'magic'; there are triton, native, reference"
    ):
        choose("norm", CPU, torch.float32, "magic")


def test_unknown_op_lists_what_exists():
    with pytest.raises(ValueError, match=r"unknown op 'nrom'; there are attention, .*norm"):
        choose("nrom", CPU, torch.float32)


def test_an_op_passes_its_implementation_argument_on():
    x = torch.ones(1, 4)

    assert torch.equal(rms_norm(x, None, 1e-6, impl="reference"), rms_norm(x, None, 1e-6))
    with pytest.raises(ValueError, match="magic"):
        rms_norm(x, None, 1e-6, impl="magic")


@pytest.mark.parametrize("op", sorted(implementations()))
def test_gpu_implementations_are_never_chosen_by_themselves_on_a_cpu(op):
    assert choose(op, CPU, torch.bfloat16) in ("native", "reference")
    assert choose(op, torch.device("meta"), torch.bfloat16) == "reference"


def test_a_gpu_implementation_asked_for_by_name_is_loaded_on_any_machine():
    assert implementation("norm", CPU, torch.bfloat16, "triton").__name__ == "dsv4_kernels.norm.triton_impl"


def test_what_an_implementation_lacks_is_said_in_words():
    assert why_not("reference", CPU) is None
    assert why_not("triton", CPU) == "needs a GPU"


def test_the_table_names_every_op_and_what_cannot_run():
    lines = {line.split()[0]: line for line in table(CPU).splitlines()}

    assert set(lines) == {"op", *implementations()}
    assert "triton needs a GPU" in lines["norm"]
