"""Writes a sharded safetensors checkpoint; headers are planned first, so that one tensor at a time is in memory."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from dsv4_cluster.weights.inventory import DTYPE_BYTES
from dsv4_cluster.weights.shards import INDEX_FILE
from dsv4_cluster.weights.stored import TORCH_DTYPES

DEFAULT_SHARD_BYTES = 4_000_000_000
_HEADER_ALIGNMENT = 8  # the format pads headers with spaces to this


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written. dtype: safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Stored bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    header: bytes
    starts: dict[str, int]  # file offset of each tensor


class ShardedWriter:
    """Context manager: every entry is written once, in any order; leaving it normally writes the index."""

    def __init__(
        self, directory: Path, entries: Sequence[TensorEntry], *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
    ) -> None:
        """Plan the shards. max_shard_bytes: tensor bytes per file; a larger tensor gets a file of its own."""
        self._directory = directory
        self._entries = {entry.name: entry for entry in entries}
        self._unwritten = dict.fromkeys(self._entries)
        groups = _group(entries, max_shard_bytes)
        self._shard_of: dict[str, _Shard] = {}
        for number, group in enumerate(groups, start=1):
            shard = _plan(directory / f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
            shard.path.write_bytes(shard.header)
            self._shard_of |= {entry.name: shard for entry in group}
        self._file: BinaryIO | None = None
        self._open_shard: _Shard | None = None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor of exactly the planned dtype and shape."""
        entry, shard = self._entries[name], self._shard_of[name]
        assert tensor.dtype == TORCH_DTYPES[entry.dtype], (name, tensor.dtype, entry.dtype)
        assert tuple(tensor.shape) == entry.shape, (name, tuple(tensor.shape), entry.shape)
        if self._open_shard is not shard:
            self._close_file()
            self._file, self._open_shard = shard.path.open("r+b"), shard
        assert self._file is not None
        self._file.seek(shard.starts[name])
        self._file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        del self._unwritten[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._close_file()
        if kind is None:
            assert not self._unwritten, (
                f"{len(self._unwritten)} tensors were not written: {next(iter(self._unwritten))}"
            )
            self._write_index()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._open_shard = None

    def _write_index(self) -> None:
        total = sum(entry.num_bytes for entry in self._entries.values())
        weight_map = {name: self._shard_of[name].path.name for name in sorted(self._entries)}
        contents = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._directory / INDEX_FILE).write_text(json.dumps(contents, indent=2) + "\n")


def _group(entries: Sequence[TensorEntry], max_shard_bytes: int) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.num_bytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.num_bytes
    return groups


def _plan(path: Path, group: Sequence[TensorEntry]) -> _Shard:
    """Lay out one file, wide dtypes first, so that every tensor is aligned to its element size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    offset = 0
    for entry in sorted(group, key=lambda entry: -DTYPE_BYTES[entry.dtype]):
        end = offset + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offsets[entry.name] = offset
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    data_start = 8 + len(encoded)
    starts = {name: data_start + offset for name, offset in offsets.items()}
    return _Shard(path, len(encoded).to_bytes(8, "little") + encoded, starts)
