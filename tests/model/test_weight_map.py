"""Loading: each rank's slices reassemble to the full model, and impossible splits are refused."""

import pytest
import torch

from dsv4_cluster.errors import CheckpointError, ConfigError
from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.model.weight_map import load_weights, parameter_parts
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.inventory import inventory
from tests.kit.model_harness import CPU

FP32_NAMES = ("hc_", "attn_sink", "ape", "gate.bias", "norm")


def _transformer(config, parallel, dtype=torch.float32):
    return Transformer(config, parallel, dtype=dtype, device=CPU, kv_cache_dtype="auto", indexer_dtype="auto")


def _mtp(config, parallel):
    return MTPModule(config, parallel, dtype=torch.float32, device=CPU, kv_cache_dtype="auto")


def _split_dim(name, specs):
    """Dim of a model parameter that ranks share, and the axis; None = every rank has all."""
    if ".experts." in name:
        return 0, "ep"
    rule = specs[name].shard
    return rule.dim, rule.axis


@pytest.mark.parametrize(
    "splits",
    [
        [ParallelState(tp_rank=r, tp_size=2) for r in range(2)],
        [ParallelState(tp_rank=r, tp_size=4) for r in range(4)],
        [ParallelState(ep_rank=r, ep_size=2) for r in range(2)],
        [ParallelState(tp_rank=r, tp_size=2, ep_rank=r, ep_size=2) for r in range(2)],
    ],
    ids=["tp2", "tp4", "ep2", "tp2_ep2"],
)
@pytest.mark.parametrize("part", ["main", "mtp"])
def test_the_ranks_slices_reassemble_to_the_full_parameters(splits, part, toy):
    build, prefix = (_transformer, "") if part == "main" else (_mtp, "mtp.0.")
    specs = inventory(toy.config)
    whole = build(toy.config, ParallelState())
    load_weights(whole, toy, ParallelState(), prefix=prefix)
    ranks = []
    for parallel in splits:
        ranks.append(build(toy.config, parallel))
        load_weights(ranks[-1], toy, parallel, prefix=prefix)

    num_split = 0
    for name, full in whole.named_parameters():
        parts = [dict(rank.named_parameters())[name] for rank in ranks]
        dim, axis = _split_dim(prefix + name, specs)
        size = splits[0].tp_size if axis == "tp" else splits[0].ep_size
        if dim is None or size == 1:
            assert all(torch.equal(values, full) for values in parts), name
        else:
            num_split += 1
            assert torch.equal(torch.cat(parts, dim), full), name
    assert num_split > 0


def test_every_checkpoint_weight_is_used_exactly_once(toy):
    specs = inventory(toy.config)

    used = [
        part.name
        for build, prefix in ((_transformer, ""), (_mtp, "mtp.0."))
        for part in parameter_parts(build(toy.config, ParallelState()), specs, ParallelState(), prefix=prefix)
    ]

    assert len(used) == len(set(used))
    assert set(used) == {name for name, spec in specs.items() if spec.scale_of is None}


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelState(tp_size=3),
        ParallelState(tp_size=8),  # 4 output groups: a group of heads is never split
        ParallelState(ep_size=3),
        ParallelState(ep_size=32),  # more ranks than experts
    ],
    ids=["tp3", "tp8", "ep3", "ep32"],
)
def test_a_split_that_does_not_divide_is_refused(parallel, toy):
    with pytest.raises(ConfigError, match="does not divide"):
        _transformer(toy.config, parallel)


def test_a_model_of_another_shape_is_refused(toy):
    other = toy.config.model_copy(update={"moe_intermediate_size": 64})

    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.experts\.0\.w1\.weight"):
        load_weights(_transformer(other, ParallelState()), toy, ParallelState())


def test_sensitive_parameters_stay_fp32_in_a_bf16_model(toy):
    model = _transformer(toy.config, ParallelState(), torch.bfloat16)
    load_weights(model, toy, ParallelState())

    for name, values in model.named_parameters():
        if name.endswith("tid2eid"):
            assert values.dtype == torch.int64
        elif any(mark in name for mark in FP32_NAMES):
            assert values.dtype == torch.float32, name
        else:
            assert values.dtype == torch.bfloat16, name


@pytest.mark.parametrize("expert_id", [-1, 16])
def test_token_table_that_names_no_expert_is_refused(expert_id, toy, monkeypatch):
    name = "layers.1.ffn.gate.tid2eid"
    read = toy.read

    def damaged(asked, index=None, *, dtype):
        values = read(asked, index, dtype=dtype)
        if asked == name:
            values[7, 2] = expert_id
        return values

    monkeypatch.setattr(toy, "read", damaged)

    with pytest.raises(CheckpointError, match=rf"{name} \[512, 6\] holds expert {expert_id} for token 7"):
        load_weights(_transformer(toy.config, ParallelState()), toy, ParallelState())
