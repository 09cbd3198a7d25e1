"""Values of config.json that cannot be a model: refused with the field, whatever their type."""

import json
from pathlib import Path

import pytest

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.errors import CheckpointError

WRONG = [True, 0.5, "x", "", [], {}, [None], {"a": 1}, float("nan"), float("inf"), -1]
SIZES = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "o_groups",
    "sliding_window",
    "index_topk",
    "n_routed_experts",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
]


@pytest.fixture
def raw(official_dir) -> dict[str, object]:
    return json.loads((Path(official_dir) / "config.json").read_text())


def refuse(raw: dict[str, object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(raw, source="config.json")
    return caught.value.message


@pytest.mark.parametrize("value", [*WRONG, 0, "64"])
@pytest.mark.parametrize("field", SIZES)
def test_size_that_is_no_positive_integer_is_named(raw, field, value):
    assert field in refuse(raw | {field: value})


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "num_hash_layers", "compress_ratios", "eos_token_id"])
def test_count_or_list_of_another_type_is_named(raw, field, value):
    assert field in refuse(raw | {field: value})


@pytest.mark.parametrize("value", ["x", [], {}, float("nan"), float("inf"), -1.0, 0])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "routed_scaling_factor", "swiglu_limit"])
def test_number_that_is_not_positive_and_finite_is_named(raw, field, value):
    assert field in refuse(raw | {field: value})


@pytest.mark.parametrize(
    ("field", "official", "values"),
    [
        ("layer_types", "compress_ratios", [True, 1, "x", [1], {"a": 1}]),
        ("mlp_layer_types", "num_hash_layers", [True, 1, "x", [1], {"a": 1}]),
        ("partial_rotary_factor", "qk_rope_head_dim", ["x", [], -0.5, 0, 2.0, float("nan")]),
        ("compress_rates", "", [1, "x", [], {"compressed_sparse_attention": "x"}]),
        ("rope_parameters", "", [1, "x", [], {"main": 1}, {"compress": 3}, {"main": {"rope_theta": "x"}}]),
    ],
)
def test_newer_form_of_another_type_is_named(raw, field, official, values):
    raw.pop(official, None)

    for value in values:
        assert field in refuse(raw | {field: value}), value


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id"])
def test_special_token_outside_the_vocabulary_is_named(raw, field):
    assert f"{field} is 512, not below vocab_size 512" in refuse(raw | {field: 512})


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_scaling_other_than_yarn_is_refused(raw, key):
    scaling = {"factor": 16, "original_max_position_embeddings": 16384, key: "linear"}

    assert "yarn" in refuse(raw | {"rope_scaling": scaling})
    assert "yarn" in refuse(raw | {"rope_parameters": {"compress": scaling}})


def test_key_that_is_there_twice_is_refused(official_copy):
    path = official_copy / "config.json"
    path.write_text(path.read_text().replace("{", '{"index_topk": 4,', 1))

    with pytest.raises(CheckpointError, match="'index_topk' is there twice"):
        ModelConfig.from_checkpoint(official_copy)
