"""The inventory reproduces the published totals of both shipped models. Source: spec 1.4, 2.1, 7.1."""

import functools
from collections import Counter

import pytest

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.tools.presets import preset_config
from dsv4_cluster.weights.inventory import TensorSpec, inventory

TOTALS = {"flash": (69_187, 159_609_485_896), "pro": (145_116, 864_704_792_696)}
MTP_BYTES = {"flash": 3_593_787_756, "pro": 13_956_587_692}
PARAMETERS = {"flash": (284_332_240_471, 6_610_048_891), "pro": (1_572_997_201_763, 25_840_145_979)}
DTYPES = {
    "flash": {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I8": 33_792, "I64": 3},
    "pro": {"BF16": 619, "F32": 590, "F8_E4M3": 528, "F8_E8M0": 71_952, "I8": 71_424, "I64": 3},
}


@functools.cache
def official(name: str) -> dict[str, TensorSpec]:
    return inventory(preset_config(name))


@pytest.fixture(params=["flash", "pro"])
def shipped(request) -> tuple[str, dict[str, TensorSpec]]:
    return request.param, official(request.param)


def test_tensor_count_and_bytes_equal_the_published_totals(shipped):
    name, specs = shipped

    assert (len(specs), sum(spec.num_bytes for spec in specs.values())) == TOTALS[name]
    assert sum(spec.num_bytes for spec in specs.values() if spec.is_mtp) == MTP_BYTES[name]


def test_dtype_histogram_equals_the_published_one(shipped):
    name, specs = shipped

    assert Counter(spec.dtype for spec in specs.values()) == DTYPES[name]


def test_parameter_counts_equal_the_published_ones(shipped):
    name, specs = shipped

    main = sum(spec.num_parameters for spec in specs.values() if not spec.is_mtp)
    mtp = sum(spec.num_parameters for spec in specs.values() if spec.is_mtp)

    assert (main, mtp) == PARAMETERS[name]


def test_flash_mtp_module_has_1575_tensors_and_can_be_left_out():
    config = preset_config("flash")

    with_mtp, without_mtp = official("flash"), inventory(config, include_mtp=False)

    assert len(with_mtp) - len(without_mtp) == 1_575
    assert not any(spec.is_mtp for spec in without_mtp.values())


def test_dspark_drafter_is_never_listed():
    config = preset_config("toy").model_copy(update={"has_dspark": True})

    assert not any(spec.is_mtp for spec in inventory(config).values())


def test_fp8_experts_are_stored_unpacked_with_square_scale_blocks():
    specs = inventory(preset_config("flash"), expert_dtype="fp8")

    weight, scale = specs["layers.5.ffn.experts.7.w2.weight"], specs["layers.5.ffn.experts.7.w2.scale"]

    assert (weight.dtype, weight.shape, scale.shape) == ("F8_E4M3", (4096, 2048), (32, 16))


def test_fp4_expert_has_half_the_columns_and_its_logical_shape():
    spec = official("flash")["layers.5.ffn.experts.7.w1.weight"]

    assert (spec.dtype, spec.shape, spec.logical_shape) == ("I8", (2048, 2048), (2048, 4096))
    assert spec.scale_block == (1, 32)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_tensor_parallel_parts_tile_every_split_tensor(num_ranks):
    for spec in official("flash").values():
        if spec.shard.dim is None or spec.expert_id is not None:
            continue

        parts = [spec.owned_index(tp_rank=rank, tp_size=num_ranks) for rank in range(num_ranks)]

        edges = [(part[spec.shard.dim].start, part[spec.shard.dim].stop) for part in parts]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
        assert edges[-1][1] == spec.logical_shape[spec.shard.dim]


def test_attention_splits_by_whole_output_groups():
    specs = official("flash")

    rank = {"tp_rank": 1, "tp_size": 8}

    assert specs["layers.0.attn.wq_b.weight"].owned_index(**rank)[0] == slice(8 * 512, 16 * 512)
    assert specs["layers.0.attn.attn_sink"].owned_index(**rank)[0] == slice(8, 16)
    assert specs["layers.0.attn.wo_a.weight"].owned_index(**rank)[0] == slice(1024, 2048)
    assert specs["layers.0.attn.wo_b.weight"].owned_index(**rank)[1] == slice(1024, 2048)
    with pytest.raises(ConfigError, match="does not divide"):
        specs["layers.0.attn.wq_b.weight"].owned_index(tp_rank=0, tp_size=16)


def test_each_expert_belongs_to_exactly_one_expert_parallel_rank():
    specs = inventory(preset_config("toy"))

    owners = {
        expert: [
            rank
            for rank in range(4)
            if specs[f"layers.0.ffn.experts.{expert}.w1.weight"].owned_index(ep_rank=rank, ep_size=4) is not None
        ]
        for expert in range(16)
    }

    assert owners == {expert: [expert // 4] for expert in range(16)}


def test_scale_rows_cover_the_owned_rows():
    specs = inventory(preset_config("toy"))  # o_lora_rank 64: a rank of four owns half a scale block

    scale = specs["layers.0.attn.wo_b.scale"]

    assert scale.stored_index(scale.owned_index(tp_rank=1, tp_size=4)) == (slice(0, 2), slice(0, 1))
    assert scale.stored_index(scale.owned_index(tp_rank=3, tp_size=4)) == (slice(0, 2), slice(1, 2))
