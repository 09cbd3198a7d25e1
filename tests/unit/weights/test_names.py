"""Our names and the public implementation's name the same tensors, in both directions."""

import pytest
import torch
from safetensors.torch import save_file

from dsv4_cluster.tools.presets import preset_config
from dsv4_cluster.weights.inventory import inventory
from dsv4_cluster.weights.names import transformers_name
from dsv4_cluster.weights.reader import Checkpoint


@pytest.fixture(scope="module")
def public_model(bf16_dir):
    from transformers import DeepseekV4ForCausalLM

    model, info = DeepseekV4ForCausalLM.from_pretrained(bf16_dir, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


@pytest.mark.parametrize("name", ["flash", "toy"])
def test_no_two_weights_share_a_transformers_name_except_fused_experts(name):
    specs = inventory(preset_config(name), include_mtp=False).values()

    names = [transformers_name(spec.name) for spec in specs if spec.expert_id is None]

    assert len(set(names)) == len(names)


def test_our_names_are_the_public_models_own(public_model, bf16_dir):
    ours = {transformers_name(name) for name in Checkpoint.open(bf16_dir).specs if not name.startswith("mtp.")}

    assert ours == {name for name in public_model.state_dict() if "rotary" not in name}


def test_state_dict_of_the_public_model_reads_back_equal(public_model, bf16_dir, tmp_path):
    tensors = {name: t.contiguous() for name, t in public_model.state_dict().items() if "rotary" not in name}
    save_file(tensors, tmp_path / "model.safetensors")
    public_model.config.save_pretrained(tmp_path)

    theirs, ours = Checkpoint.open(tmp_path), Checkpoint.open(bf16_dir)

    assert not theirs.has_mtp
    for name, spec in theirs.specs.items():
        dtype = torch.int64 if spec.dtype == "I64" else torch.float32
        assert torch.equal(theirs.read(name, dtype=dtype), ours.read(name, dtype=dtype)), name


def test_directory_saved_by_the_public_library_opens(public_model, bf16_dir, tmp_path):
    public_model.save_pretrained(tmp_path, max_shard_size="20MB")

    theirs, ours = Checkpoint.open(tmp_path), Checkpoint.open(bf16_dir)

    assert theirs.config.compress_ratios == ours.config.compress_ratios
    for name, spec in theirs.specs.items():
        dtype = torch.int64 if spec.dtype == "I64" else torch.float32
        assert torch.equal(theirs.read(name, dtype=dtype), ours.read(name, dtype=dtype)), name
