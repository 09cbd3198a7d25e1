"""Every shape preset is a valid config for us and for the public implementation."""

import pytest

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.tools.presets import preset_config, preset_json, preset_names

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def test_all_presets_are_listed():
    assert preset_names() == ("flash", "medium", "pro", "tiny", "toy")


def test_unknown_preset_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="'huge'; known: flash, medium, pro, tiny, toy"):
        preset_json("huge")


@pytest.mark.parametrize("name", preset_names())
def test_transformers_reads_the_same_dimensions(name):
    from transformers import DeepseekV4Config

    ours, theirs = preset_config(name), DeepseekV4Config(**preset_json(name))

    assert theirs.layer_types == [KINDS[ours.compress_ratio(n)] for n in range(ours.num_hidden_layers)]
    assert theirs.mlp_layer_types.count("hash_moe") == ours.num_hash_layers == 3
    assert theirs.qk_rope_head_dim == ours.qk_rope_head_dim
    assert theirs.rope_parameters["compress"]["rope_type"] == "yarn"
    assert theirs.rope_parameters["compress"]["factor"] == ours.rope_scaling.factor
    for field in (
        *("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "index_topk"),
        *("index_n_heads", "index_head_dim", "n_routed_experts", "moe_intermediate_size", "routed_scaling_factor"),
        *("vocab_size", "max_position_embeddings", "swiglu_limit", "hc_mult", "rms_norm_eps", "sliding_window"),
    ):
        assert getattr(theirs, field) == getattr(ours, field), field


@pytest.mark.parametrize("name", preset_names())
def test_yarn_stretches_to_the_maximum_position(name):
    config = preset_config(name)

    stretched = config.rope_scaling.factor * config.rope_scaling.original_max_position_embeddings

    assert stretched == config.max_position_embeddings
