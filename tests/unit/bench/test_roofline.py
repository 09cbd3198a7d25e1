import math

import pytest
import torch

from dsv4_cluster.bench.roofline import bytes_per_expert_weight, decode_weight_bytes, read_bandwidth
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.loader import load_model
from dsv4_cluster.parallel.state import ParallelState
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


@pytest.mark.parametrize(
    ("dtype", "fmt", "size"),
    [("bfloat16", "official", 17 / 32), ("bfloat16", "bf16", 17 / 32), ("float32", "official", 4)],
)
def test_expert_weights_of_deepseek_checkpoints_stay_fp4_under_the_c_kernels(dtype, fmt, size, checkpoint_dir):
    loaded = load_model(
        checkpoint_dir("toy", fmt),
        EngineConfig(dtype=dtype),
        KVConfig(num_pages=1),
        SpeculationConfig(),
        ParallelState(),
    )
    whole = Checkpoint.open(checkpoint_dir("toy", fmt))

    assert whole.has_fp4_experts == (fmt == "official")
    assert bytes_per_expert_weight(loaded.model, loaded.config) == size
    assert decode_weight_bytes(loaded.config, torch.bfloat16, 10**6, bytes_per_expert_weight=size) == pytest.approx(
        2 * _elements(whole, is_expert=False) + size * _elements(whole, is_expert=True), rel=1e-9
    )


def test_bandwidth_is_of_a_plausible_size():
    assert 1e8 < read_bandwidth(num_repeats=1) < 1e13  # between a slow disk and any accelerator
