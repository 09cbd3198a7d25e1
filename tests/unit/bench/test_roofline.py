import math

import pytest
import torch

from dsv4_cluster.bench.roofline import decode_weight_bytes, read_bandwidth
from dsv4_cluster.weights.reader import Checkpoint


@pytest.fixture(scope="module")
def checkpoint(toy_dir):
    return Checkpoint.open(toy_dir)


def _elements(checkpoint, *, is_expert):
    return sum(
        math.prod(spec.logical_shape)
        for name, spec in checkpoint.specs.items()
        if (".ffn.experts." in name) == is_expert
        and not name.startswith(("embed.", "mtp."))
        and not name.endswith((".scale", "tid2eid"))
    )


def test_one_token_reads_the_dense_weights_and_its_own_experts(checkpoint):
    config = checkpoint.config
    share = config.num_experts_per_tok / config.n_routed_experts

    expected = _elements(checkpoint, is_expert=False) + share * _elements(checkpoint, is_expert=True)

    assert decode_weight_bytes(config, torch.bfloat16, 1) == pytest.approx(2 * expected, rel=1e-9)


def test_a_huge_batch_reads_every_weight_once(checkpoint):
    expected = _elements(checkpoint, is_expert=False) + _elements(checkpoint, is_expert=True)

    assert decode_weight_bytes(checkpoint.config, torch.float32, 10**6) == pytest.approx(4 * expected, rel=1e-9)


def test_bandwidth_is_of_a_plausible_size():
    assert 1e8 < read_bandwidth(num_repeats=1) < 1e13  # between a slow disk and any accelerator
