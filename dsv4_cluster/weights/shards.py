"""The tensors of a checkpoint directory: every shard's header, cross-checked with the index."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsv4_cluster.config.checkpoint_json import parse_json_object
from dsv4_cluster.errors import CheckpointError
from dsv4_cluster.weights.stored import StoredTensor, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SAMPLE_BYTES = 4096
_SAMPLES_PER_SHARD = 16
_ROUTED_EXPERT = ".experts."  # in the official and the transformers names


@dataclass(frozen=True, slots=True)
class ShardSet:
    """All stored tensors by stored name, and the files that hold them."""

    tensors: dict[str, StoredTensor]
    paths: tuple[Path, ...]  # sorted

    def sample_digest(self) -> str:
        """Hash that tells checkpoints of equal shape apart without reading them whole.

        Covers shard names and sizes, blocks spread over each shard, and the start of every tensor that is not a routed
        expert's: there are few of those, and each may be the only difference.
        """
        digest = hashlib.sha256()
        for path in self.paths:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            offsets = [
                max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_SHARD - 1)
                for sample in range(_SAMPLES_PER_SHARD)
            ]
            offsets += [t.offset for t in self.tensors.values() if t.path == path and _ROUTED_EXPERT not in t.name]
            with path.open("rb") as file:
                for offset in sorted(offsets):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def open_shards(directory: Path) -> ShardSet:
    """Read all headers of a checkpoint directory, sharded or a single file.

    Raises: CheckpointError that names the tensor or the file: no weights, missing or damaged shard, a tensor that is
        not in the shard the index names, a tensor that the index does not list.
    """
    index_path, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index_path.exists():
        return _open_indexed(directory, _read_weight_map(index_path))
    if single.exists():
        return ShardSet(read_header(single), (single,))
    raise CheckpointError(f"{directory} has neither {INDEX_FILE} nor {SINGLE_FILE}")


def _read_weight_map(index_path: Path) -> dict[str, str]:
    try:
        index = parse_json_object(index_path.read_bytes(), source=index_path.name)
    except OSError as err:
        raise CheckpointError(f"{index_path.name}: cannot read index: {err}") from err
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path.name}: weight_map is not a filled JSON object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index_path.name}: tensor {name} lies in {shard!r}, expected a plain file name")
    return weight_map


def _open_indexed(directory: Path, weight_map: dict[str, str]) -> ShardSet:
    headers: dict[str, dict[str, StoredTensor]] = {}
    present = {path.name for path in directory.iterdir()}
    for shard, name in {shard: name for name, shard in weight_map.items()}.items():
        if shard not in present:
            raise CheckpointError(f"shard {shard} is missing; the index places tensor {name} there")
        headers[shard] = read_header(directory / shard)
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(f"tensor {name} is not in {shard}, where the index places it{_found(name, headers)}")
    for shard, header in headers.items():
        for name in header:
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{shard} holds tensor {name}, which the index does not place there")
    tensors = {name: headers[shard][name] for name, shard in weight_map.items()}
    return ShardSet(tensors, tuple(directory / shard for shard in sorted(headers)))


def _found(name: str, headers: dict[str, dict[str, StoredTensor]]) -> str:
    holders: Iterable[str] = (shard for shard, header in headers.items() if name in header)
    holder = next(iter(holders), None)
    return f"; {holder} has it" if holder else ""
