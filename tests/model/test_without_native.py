"""Machines without the native CPU kernels run the torch implementations: the same numbers within fp32 rounding."""

import pytest
import torch

from dsv4_cluster.model.weight_map import pack_weights
from dsv4_cluster.weights.reader import Checkpoint
from dsv4_kernels import dispatch
from dsv4_kernels.mhc import reference
from tests.kit.model_harness import Harness, load_model

TOLERANCE = 1e-4  # |difference of log-probabilities|, fp32 on both sides


@pytest.fixture
def prompt() -> list[int]:
    return torch.randint(0, 512, (300,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture
def expected(toy_dir, prompt) -> torch.Tensor:
    checkpoint = Checkpoint.open(toy_dir)
    model = load_model(checkpoint)
    pack_weights(model)
    return Harness(model, checkpoint.config).logprobs(prompt)


@pytest.mark.parametrize("cut", [300, 5, 130])
def test_torch_implementations_equal_the_native_ones(cut, toy_dir, prompt, expected, without_native):
    checkpoint = Checkpoint.open(toy_dir)
    model = load_model(checkpoint)
    pack_weights(model)

    logprobs = Harness(model, checkpoint.config).logprobs(prompt, [cut])

    assert (logprobs - expected).abs().max() <= TOLERANCE
    cpu = torch.device("cpu")
    assert {dispatch.choose(op, cpu, torch.bfloat16) for op in ("gemm", "mhc", "moe", "rope")} == {"reference"}
    assert dispatch.implementation("mhc", cpu, torch.bfloat16) is reference
