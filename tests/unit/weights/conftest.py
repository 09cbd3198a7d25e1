"""Small checkpoints on disk, made once per session, and copies that a test may damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsv4_cluster.tools.make_checkpoint import make_checkpoint
from dsv4_cluster.weights.inventory import inventory
from dsv4_cluster.weights.names import transformers_name
from dsv4_cluster.weights.reader import Checkpoint
from dsv4_cluster.weights.shards import INDEX_FILE
from dsv4_cluster.weights.stored import TORCH_DTYPES
from dsv4_cluster.weights.writer import ShardedWriter, TensorEntry

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@pytest.fixture(scope="session")
def official_dir(tmp_path_factory) -> Path:
    return make_checkpoint("toy", tmp_path_factory.mktemp("official") / "toy", seed=3).path


@pytest.fixture(scope="session")
def bf16_dir(tmp_path_factory) -> Path:
    return make_checkpoint("toy", tmp_path_factory.mktemp("bf16") / "toy", seed=3, fmt="bf16").path


@pytest.fixture(scope="session")
def transformers_dir(tmp_path_factory, official_dir) -> Path:
    """The official toy's main model under transformers names: quantised as stored, experts fused."""
    directory = tmp_path_factory.mktemp("transformers")
    write_tensors(directory, fuse(load_tensors(official_dir)))
    shutil.copy(official_dir / "config.json", directory)
    return directory


@pytest.fixture
def damage(official_dir, tmp_path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], Path]:
    """Rewrite the official toy after a change to its tensors; returns the new directory."""

    def apply(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        tensors = load_tensors(official_dir)
        change(tensors)
        write_tensors(tmp_path, tensors)
        shutil.copy(official_dir / "config.json", tmp_path)
        return tmp_path

    return apply


@pytest.fixture
def official_copy(official_dir, tmp_path) -> Path:
    """A copy of the official toy whose files may be damaged."""
    return Path(shutil.copytree(official_dir, tmp_path / "copy"))


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor of an official directory, in its stored dtype."""
    checkpoint = Checkpoint.open(directory)
    return {
        name: checkpoint.read_raw(name).view(TORCH_DTYPES[stored.dtype]).reshape(stored.shape)
        for name, stored in checkpoint.stored_tensors.items()
    }


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    entries = [TensorEntry(name, _DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    with ShardedWriter(directory, entries, max_shard_bytes=4_000_000) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename to the transformers format and stack the experts of each layer."""
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("mtp.") and ".experts." not in name:
            fused[transformers_name(name)] = tensor
    for layer_id in {name.split(".")[1] for name in tensors if name.startswith("layers.")}:
        for part in ("weight", "scale"):
            prefix = f"layers.{layer_id}.ffn.experts"
            num_experts = sum(name.startswith(prefix) and name.endswith("w1.weight") for name in tensors)
            w1, w2, w3 = (
                torch.stack([tensors[f"{prefix}.{e}.{matrix}.{part}"].view(torch.uint8) for e in range(num_experts)])
                for matrix in ("w1", "w2", "w3")
            )
            dtype = tensors[f"{prefix}.0.w1.{part}"].dtype
            fused[transformers_name(f"{prefix}.0.w1.{part}")] = torch.cat((w1, w3), dim=1).view(dtype)
            fused[transformers_name(f"{prefix}.0.w2.{part}")] = w2.view(dtype)
    return fused


@pytest.fixture
def edit_index(official_copy) -> Callable[[Callable[[dict[str, str]], None]], Path]:
    """Change the weight map of a copy; returns its directory."""

    def apply(change: Callable[[dict[str, str]], None]) -> Path:
        path = official_copy / INDEX_FILE
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
        return official_copy

    return apply


@pytest.fixture
def toy_specs(official_dir):
    return inventory(Checkpoint.open(official_dir).config)
