"""A bad checkpoint is refused when it is opened, with the tensor and both shapes in the message."""

import json
import logging

import pytest
import torch

from dsv4_cluster.errors import CheckpointError
from dsv4_cluster.weights.reader import Checkpoint


def refuse(directory) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    return caught.value.message


def test_missing_tensor_is_named_with_its_shape(damage):
    message = refuse(damage(lambda tensors: tensors.pop("layers.2.attn.wkv.weight")))

    assert "missing tensor layers.2.attn.wkv.weight" in message
    assert "[128, 256]" in message and "found none" in message


def test_missing_scale_is_named_with_its_shape(damage):
    message = refuse(damage(lambda tensors: tensors.pop("layers.2.ffn.experts.3.w1.scale")))

    assert "missing tensor layers.2.ffn.experts.3.w1.scale" in message and "[128, 8]" in message


def test_extra_tensor_is_named_with_its_shape(damage):
    message = refuse(damage(lambda tensors: tensors.update({"layers.9.attn.wkv.weight": torch.zeros(3, 5)})))

    assert "extra tensor layers.9.attn.wkv.weight" in message
    assert "[3, 5]" in message and "expected none" in message


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.2.attn.wkv.weight", [127, 256], [128, 256]),
        ("layers.2.ffn.experts.3.w1.weight", [128, 256], [128, 128]),  # unpacked width under a packed dtype
        ("layers.2.attn.wq_b.scale", [8, 2], [8, 1]),
        ("layers.4.attn.compressor.ape", [4, 128], [4, 256]),
        ("embed.weight", [511, 256], [512, 256]),
    ],
)
def test_misshapen_tensor_is_named_with_both_shapes(damage, name, shape, expected):
    def reshape(tensors):
        tensors[name] = torch.zeros(shape).to(tensors[name].dtype)

    message = refuse(damage(reshape))

    assert name in message and str(shape) in message and str(expected) in message


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("norm.weight", torch.int8, "BF16 or F32"),
        ("layers.0.ffn.gate.tid2eid", torch.float32, "I64"),
        ("layers.2.attn.wkv.weight", torch.int8, "F8_E4M3 or BF16 or F32"),
        ("layers.2.attn.wkv.scale", torch.bfloat16, "F8_E8M0 or F32"),
        ("layers.0.attn.attn_sink", torch.float8_e4m3fn, "F32 or BF16"),
    ],
)
def test_wrong_dtype_is_named_with_the_expected_ones(damage, name, dtype, expected):
    def retype(tensors):
        tensors[name] = torch.zeros(tensors[name].shape).to(dtype)

    message = refuse(damage(retype))

    assert name in message and f"expected {expected}" in message


def shard_of(directory):
    return next(directory.glob("*.safetensors"))


def test_truncated_shard_names_the_cut_tensor(official_copy):
    shard = shard_of(official_copy)
    shard.write_bytes(shard.read_bytes()[:-1000])

    message = refuse(official_copy)

    assert shard.name in message and "truncated: tensor" in message


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 64, (20).to_bytes(8, "little") + b"{not json.......... "])
def test_damaged_header_names_the_shard(official_copy, content):
    shard_of(official_copy).write_bytes(content)

    assert shard_of(official_copy).name in refuse(official_copy)


def test_header_whose_offsets_disagree_with_the_shape_names_the_tensor(official_copy):
    shard = shard_of(official_copy)
    raw = shard.read_bytes()
    shard.write_bytes(
        raw.replace(b'"norm.weight":{"dtype":"BF16","shape":[256]', b'"norm.weight":{"dtype":"BF16","shape":[255]')
    )

    message = refuse(official_copy)

    assert "norm.weight" in message and "[255]" in message and "needs 510 bytes" in message


def test_missing_shard_is_named_with_a_tensor_of_it(official_copy):
    shard = shard_of(official_copy)
    shard.unlink()

    message = refuse(official_copy)

    assert f"shard {shard.name} is missing" in message and "tensor " in message


def test_index_that_points_to_another_shard_names_both(damage):
    directory = damage(lambda tensors: None)
    index_path = directory / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    right = index["weight_map"]["embed.weight"]
    wrong = next(shard for shard in index["weight_map"].values() if shard != right)
    index["weight_map"]["embed.weight"] = wrong
    index_path.write_text(json.dumps(index))

    message = refuse(directory)

    assert "embed.weight" in message and wrong in message and f"{right} has it" in message


def test_tensor_that_the_index_does_not_list_is_named(edit_index):
    message = refuse(edit_index(lambda weight_map: weight_map.pop("norm.weight")))

    assert "norm.weight" in message


def test_index_cannot_leave_the_directory(edit_index):
    message = refuse(edit_index(lambda weight_map: weight_map.update({"norm.weight": "../model.safetensors"})))

    assert "norm.weight" in message and "plain file name" in message


def test_directory_without_weights_or_config_is_refused(tmp_path, official_dir):
    assert "config.json" in refuse(tmp_path)

    (tmp_path / "config.json").write_bytes((official_dir / "config.json").read_bytes())

    assert "neither model.safetensors.index.json nor model.safetensors" in refuse(tmp_path)


@pytest.mark.parametrize("model_type", ["deepseek_v41", "deepseek_v3", None])
def test_other_model_types_are_refused(official_copy, model_type):
    path = official_copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))

    assert repr(model_type) in refuse(official_copy)


def test_reading_an_unknown_name_is_refused(official_dir):
    with pytest.raises(CheckpointError, match=r"layers\.99"):
        Checkpoint.open(official_dir).read("layers.99.attn.wkv.weight", dtype=torch.float32)


def test_partial_mtp_module_is_refused(damage):
    message = refuse(damage(lambda tensors: tensors.pop("mtp.0.e_proj.weight")))

    assert "mtp.0.e_proj.weight" in message


def test_checkpoint_without_mtp_tensors_opens_without_mtp(damage, official_dir):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    checkpoint = Checkpoint.open(damage(drop))

    assert not checkpoint.has_mtp
    assert Checkpoint.open(official_dir).has_mtp


@pytest.mark.parametrize("config_says_so", [True, False])
def test_dspark_drafter_is_ignored_with_one_warning(damage, caplog, config_says_so):
    def replace_drafter(tensors):
        del tensors["mtp.0.e_proj.weight"], tensors["mtp.0.e_proj.scale"]
        tensors["mtp.0.main_proj.weight"] = torch.zeros(7, 3)

    directory = damage(replace_drafter)
    if config_says_so:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "dspark_block_size": 5}))

    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(directory)

    assert not checkpoint.has_mtp
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not any(name.startswith("mtp.") for name in checkpoint.specs)
