"""A made checkpoint is complete, reproducible, and never half there."""

import io
import json

import pytest
import torch
from rich.console import Console

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.tools import make_checkpoint as module
from dsv4_cluster.tools.make_checkpoint import make_checkpoint
from dsv4_cluster.weights.reader import Checkpoint

FILES = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("model.safetensors.index.json", "model-00001-of-00001.safetensors", "dsv4_make_checkpoint.json"),
}


def test_official_directory_is_complete_and_opens(toy_dir):
    config = json.loads((toy_dir / "config.json").read_text())

    checkpoint = Checkpoint.open(toy_dir)

    assert {path.name for path in toy_dir.iterdir()} == FILES
    assert checkpoint.has_mtp and checkpoint.config.vocab_size == 512
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert checkpoint.specs["layers.0.ffn.experts.0.w1.weight"].dtype == "I8"


def test_bf16_config_promises_no_quantisation(tmp_path):
    made = make_checkpoint("toy", tmp_path / "toy", fmt="bf16")

    config = json.loads((made.path / "config.json").read_text())

    assert "quantization_config" not in config and "expert_dtype" not in config
    assert {spec.dtype for spec in Checkpoint.open(made.path).specs.values()} == {"BF16", "F32", "I64"}


def test_same_recipe_gives_the_same_bytes_and_another_seed_does_not(toy_dir, tmp_path):
    again = make_checkpoint("toy", tmp_path / "again").path
    other = make_checkpoint("toy", tmp_path / "other", seed=1).path

    name = "model-00001-of-00001.safetensors"
    assert (again / name).read_bytes() == (toy_dir / name).read_bytes()
    assert (other / name).read_bytes() != (toy_dir / name).read_bytes()


def test_second_call_leaves_the_directory_alone(tmp_path):
    first = make_checkpoint("toy", tmp_path / "toy")
    before = {path.name: path.stat().st_mtime_ns for path in first.path.iterdir()}

    second = make_checkpoint("toy", tmp_path / "toy")

    assert (first.created, second.created) == (True, False)
    assert {path.name: path.stat().st_mtime_ns for path in first.path.iterdir()} == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"fmt": "bf16"}, {"preset": "tiny"}])
def test_directory_of_another_recipe_is_refused(toy_dir, change):
    with pytest.raises(ConfigError, match="holds another checkpoint"):
        make_checkpoint(change.pop("preset", "toy"), toy_dir, **change)


def test_foreign_directory_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(ConfigError, match="not empty"):
        make_checkpoint("toy", tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_empty_directory_is_filled(tmp_path):
    assert make_checkpoint("toy", tmp_path).created
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tokenizer", full_disk)

    with pytest.raises(OSError, match="No space left"):
        make_checkpoint("toy", tmp_path / "toy")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("preset", "fmt", "message"), [("huge", "official", "unknown shape preset"), ("toy", "int4", "format is 'int4'")]
)
def test_unknown_preset_and_format_are_refused(tmp_path, preset, fmt, message):
    with pytest.raises(ConfigError, match=message):
        make_checkpoint(preset, tmp_path / "x", fmt=fmt)

    assert list(tmp_path.iterdir()) == []


def test_shape_larger_than_the_disk_is_refused_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: module.shutil._ntuple_diskusage(10, 9, 1))

    with pytest.raises(ConfigError, match="1 bytes free, the checkpoint needs 12,513,214"):
        make_checkpoint("toy", tmp_path / "toy")

    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_the_given_console(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True)

    make_checkpoint("toy", tmp_path / "toy", console=console)

    assert "toy (official, seed 0)" in console.file.getvalue()


def test_token_tables_name_distinct_experts_and_use_all_of_them(toy_dir):
    table = Checkpoint.open(toy_dir).read("layers.1.ffn.gate.tid2eid", dtype=torch.int64)

    assert table.shape == (512, 6)
    assert all(len(set(row)) == 6 for row in table.tolist())
    assert set(table.flatten().tolist()) == set(range(16))


def test_side_parameters_are_far_from_neutral(toy_dir):
    checkpoint = Checkpoint.open(toy_dir)

    for name in (
        "attn.attn_sink",
        "attn.compressor.ape",
        "ffn.gate.bias",
        "hc_attn_fn",
        "hc_attn_base",
        "hc_ffn_scale",
    ):
        values = checkpoint.read(f"layers.4.{name}", dtype=torch.float32)
        assert values.isfinite().all() and values.std() > 1e-2 and values.abs().max() > 0.05, name
