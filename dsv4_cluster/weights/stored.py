"""One safetensors file: its header, checked, and the bytes of one tensor or of a slice of it.

The header is parsed here and not by the safetensors library, so that a damaged file is reported by tensor and offset,
and so that scale bytes (F8_E8M0) slice like every other dtype. A slice touches only its own pages of the file.
"""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dsv4_cluster.config.checkpoint_json import parse_json_object
from dsv4_cluster.errors import CheckpointError

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I64": torch.int64,
}
_RAW_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_LENGTH_BYTES = 8  # little-endian header length in front of the header
_MAX_HEADER_BYTES = 100_000_000  # limit of the format itself


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `num_bytes` from `offset` of `path`."""

    name: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name. Raises: CheckpointError when the file is absent, truncated or inconsistent."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if file_bytes < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
                raise CheckpointError(
                    f"{path.name}: header of {length} bytes does not fit a file of {file_bytes} bytes"
                )
            header = parse_json_object(file.read(length), source=f"header of {path.name}")
    except OSError as err:
        raise CheckpointError(f"{path.name}: cannot read shard: {err}") from err
    data_start = _LENGTH_BYTES + length
    tensors = {
        name: _parse_entry(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
    }
    for tensor in tensors.values():
        _check_extent(tensor, file_bytes)
    _check_tiling(tensors.values(), path, data_start, file_bytes)
    return tensors


def _parse_entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(f"{path.name}: damaged header entry of tensor {name}: {entry!r}") from err
    is_sound = isinstance(dtype, str) and all(type(number) is int for number in (*shape, start, stop))
    if not is_sound or start < 0 or stop < start or min(shape, default=0) < 0:
        raise CheckpointError(f"{path.name}: damaged header entry of tensor {name}: {entry!r}")
    return StoredTensor(name, dtype, shape, path, data_start + start, stop - start)


def _check_extent(tensor: StoredTensor, file_bytes: int) -> None:
    if tensor.offset + tensor.num_bytes > file_bytes:
        raise CheckpointError(
            f"{tensor.path.name}: truncated: tensor {tensor.name} {list(tensor.shape)} ends at byte "
            f"{tensor.offset + tensor.num_bytes}, the file has {file_bytes}"
        )
    if tensor.dtype not in TORCH_DTYPES:
        return  # refused later with the expected dtype, when the tensor is one of the model's
    expected = math.prod(tensor.shape) * TORCH_DTYPES[tensor.dtype].itemsize
    if tensor.num_bytes != expected:
        raise CheckpointError(
            f"{tensor.path.name}: tensor {tensor.name} {tensor.dtype} {list(tensor.shape)} needs {expected} bytes, "
            f"the header gives it {tensor.num_bytes}"
        )


def _check_tiling(tensors: Iterable[StoredTensor], path: Path, data_start: int, file_bytes: int) -> None:
    """The format wants every byte to belong to exactly one tensor; otherwise an offset is wrong and so are weights."""
    end, before = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{path.name}: tensor {tensor.name} {list(tensor.shape)} starts at byte {tensor.offset}, expected "
                f"{end}, where {before} ends"
            )
        end, before = tensor.offset + tensor.num_bytes, f"tensor {tensor.name}"
    if end != file_bytes:
        raise CheckpointError(f"{path.name}: {before} ends at byte {end}, the file has {file_bytes}")


def read_slice(tensor: StoredTensor, index: tuple[slice, ...]) -> torch.Tensor:
    """Copy a slice out of the file.

    index: one slice per stored dim, step 1. Returns: the stored dtype, contiguous, on CPU.
    Raises: CheckpointError when the file changed since its header was read.
    """
    dtype = TORCH_DTYPES[tensor.dtype]
    shape = tuple(part.stop - part.start for part in index)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    raw = _map(tensor).view(_RAW_DTYPES[dtype.itemsize]).reshape(tensor.shape)[index]
    return torch.from_numpy(np.array(raw, order="C")).view(dtype)


def read_bytes(tensor: StoredTensor) -> torch.Tensor:
    """The tensor's bytes as stored. Returns: [num_bytes] uint8."""
    if tensor.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.array(_map(tensor)))


def _map(tensor: StoredTensor) -> np.ndarray:
    """Map the tensor's bytes for one read; unmapped with the last view, so that only live pages stay resident."""
    page_start = tensor.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with tensor.path.open("rb") as file:
            length = tensor.offset - page_start + tensor.num_bytes
            view = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=page_start)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{tensor.path.name}: cannot read tensor {tensor.name}: {err}") from err
    return np.frombuffer(view, np.uint8, count=tensor.num_bytes, offset=tensor.offset - page_start)
