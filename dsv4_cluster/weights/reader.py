"""A checkpoint on disk as the official logical weights, whatever format it is stored in.

Opening reads headers only and checks every tensor against the inventory; reading touches one tensor at a time and only
the bytes of the wanted slice. Official FP8/FP4, BF16-only and transformers-format directories answer alike.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.errors import CheckpointError
from dsv4_cluster.weights.formats import SCALE_DTYPES, allowed_dtypes, as_stored, cover, dequantise
from dsv4_cluster.weights.inventory import TensorSpec, inventory
from dsv4_cluster.weights.names import Placement, official_placement, saved_placement, transformers_placement
from dsv4_cluster.weights.shards import ShardSet, open_shards
from dsv4_cluster.weights.stored import StoredTensor, read_bytes, read_slice

logger = logging.getLogger(__name__)

_DSPARK_MARKS = (".main_proj.", ".main_norm.", ".markov_head.")  # drafter tensors that an MTP module never has


@dataclass(frozen=True, slots=True)
class _Weight:
    """An official weight found in the checkpoint; `spec` has the dtype and shape of its own stored part."""

    spec: TensorSpec
    placement: Placement
    stored: StoredTensor
    scale: StoredTensor | None


class Checkpoint:
    """Weights of one checkpoint directory by official name, in logical [out, in] coordinates."""

    def __init__(self, config: ModelConfig, shards: ShardSet, weights: dict[str, _Weight], *, has_mtp: bool) -> None:
        self.config = config
        self.has_mtp = has_mtp  # an MTP module is present and usable
        self.fingerprint = hashlib.sha256(f"{config.model_dump_json()}|{shards.sample_digest()}".encode()).hexdigest()
        self._shards = shards
        self._weights = weights

    @classmethod
    def open(cls, directory: str | Path, config: ModelConfig | None = None) -> Self:
        """Read config and headers and check every tensor.

        config: replaces the directory's config.json. A DSpark drafter (`mtp.*`) is ignored with one warning.
        Raises: CheckpointError that names the tensor and both shapes: unknown model_type, missing, extra or misshapen
            tensor, wrong dtype, missing or damaged shard, wrong index.
        """
        directory = Path(directory)
        config = config or ModelConfig.from_checkpoint(directory)
        shards = open_shards(directory)
        tensors = shards.tensors
        place = _detect_names(tensors, directory)
        mtp_names = [name for name in tensors if name.startswith("mtp.")]
        is_dspark = config.has_dspark or any(mark in name for name in mtp_names for mark in _DSPARK_MARKS)
        if is_dspark and mtp_names:
            logger.warning("%s: mtp.* is a DSpark drafter, not an MTP module; it is ignored", directory)
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
        # Only the official format has an MTP module; beside other names its tensors are extra.
        has_mtp = config.has_mtp and not is_dspark and bool(mtp_names) and place is official_placement
        specs = inventory(config, include_mtp=has_mtp)
        return cls(config, shards, _match(specs.values(), tensors, place), has_mtp=has_mtp)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every official weight (no scales) with the dtype, shape and scale block that this checkpoint stores."""
        return MappingProxyType({name: weight.spec for name, weight in self._weights.items()})

    @property
    def has_fp4_experts(self) -> bool:
        """All routed experts are stored as packed FP4."""
        experts = [spec for spec in self.specs.values() if spec.expert_id is not None]
        return all(spec.granule[1] > 1 for spec in experts)

    @property
    def stored_tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the files by stored name, scales and ignored ones included."""
        return MappingProxyType(self._shards.tensors)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, dtype: torch.dtype) -> torch.Tensor:
        """Read a weight or a slice of it, dequantised.

        name: official. index: slices of step 1 over the logical dims, leading ones suffice; None = everything.
        Returns: contiguous CPU tensor of `dtype` in logical [out, in] order.
        Raises: CheckpointError for a name that this checkpoint does not hold.
        """
        weight = self._weights.get(name)
        if weight is None:
            raise CheckpointError(f"tensor {name} is not a weight of this checkpoint")
        full_index = _normalise(weight.spec, index)
        if weight.scale is None:
            return read_slice(weight.stored, _locate(weight, full_index))[_inside(weight)].to(dtype)
        return _read_quantised(weight, weight.scale, full_index, dtype)

    def read_raw(self, stored_name: str) -> torch.Tensor:
        """Bytes of a tensor as stored, by stored name. Returns: [num_bytes] uint8. Raises: CheckpointError."""
        stored = self._shards.tensors.get(stored_name)
        if stored is None:
            raise CheckpointError(f"tensor {stored_name} is not stored in this checkpoint")
        return read_bytes(stored)


def _detect_names(tensors: Mapping[str, StoredTensor], directory: Path) -> Callable[[TensorSpec], Placement]:
    if "embed.weight" in tensors:
        return official_placement
    if "model.embed_tokens.weight" in tensors:
        return saved_placement if "head.weight" in tensors else transformers_placement
    raise CheckpointError(f"{directory} has neither tensor embed.weight (official) nor model.embed_tokens.weight")


def _match(
    specs: Iterable[TensorSpec], tensors: Mapping[str, StoredTensor], place: Callable[[TensorSpec], Placement]
) -> dict[str, _Weight]:
    """Find and check every weight; then nothing may be left over."""
    weights: dict[str, _Weight] = {}
    used: set[str] = set()
    for spec in specs:
        if spec.scale_of is not None:
            continue
        weight = _find(spec, place(spec), tensors)
        used.add(weight.stored.name)
        if weight.scale is not None:
            used.add(weight.scale.name)
        weights[spec.name] = weight
    extra = [name for name in tensors if name not in used]
    if extra:
        first, more = tensors[extra[0]], f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"extra tensor {first.name}: found {first.dtype} {list(first.shape)}, expected none of that name{more}"
        )
    return weights


def _find(spec: TensorSpec, placement: Placement, tensors: Mapping[str, StoredTensor]) -> _Weight:
    stored = tensors.get(placement.name)
    if stored is None:
        shape = placement.stored_shape(spec.shape, spec.num_experts)
        raise CheckpointError(f"missing tensor {placement.name}: expected {spec.dtype} {list(shape)}, found none")
    if stored.dtype not in allowed_dtypes(spec):
        raise CheckpointError(
            f"tensor {stored.name} has dtype {stored.dtype} {list(stored.shape)}, expected "
            f"{' or '.join(allowed_dtypes(spec))} {list(placement.stored_shape(spec.shape, spec.num_experts))}"
        )
    spec = as_stored(spec, stored.dtype)
    _check_shape(stored, placement.stored_shape(spec.shape, spec.num_experts))
    if spec.scale_block is None:
        return _Weight(spec, placement, stored, None)
    scale = _find_scale(spec, placement, tensors)
    return _Weight(replace(spec, scale_dtype=scale.dtype), placement, stored, scale)


def _find_scale(spec: TensorSpec, placement: Placement, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    assert spec.scale_block is not None, spec
    stacked = (spec.logical_shape[0] * placement.num_row_blocks, spec.logical_shape[1])
    blocks = tuple(-(-size // block) for size, block in zip(stacked, spec.scale_block, strict=True))
    shape = blocks if placement.expert_id is None else (spec.num_experts, *blocks)
    scale = tensors.get(placement.scale_name)
    if scale is None:
        raise CheckpointError(f"missing tensor {placement.scale_name}: expected F8_E8M0 {list(shape)}, found none")
    if scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"tensor {scale.name} has dtype {scale.dtype} {list(scale.shape)}, expected "
            f"{' or '.join(SCALE_DTYPES)} {list(shape)}"
        )
    _check_shape(scale, shape)
    return scale


def _check_shape(stored: StoredTensor, expected: tuple[int, ...]) -> None:
    if stored.shape != expected:
        raise CheckpointError(
            f"tensor {stored.name} has shape {list(stored.shape)} ({stored.dtype}), expected {list(expected)}"
        )


def _normalise(spec: TensorSpec, index: tuple[slice, ...] | None) -> tuple[slice, ...]:
    """Fill up missing dims and resolve open ends."""
    index = index or ()
    assert len(index) <= len(spec.logical_shape), (spec.name, index, spec.logical_shape)
    index = index + (slice(None),) * (len(spec.logical_shape) - len(index))
    resolved = []
    for part, size in zip(index, spec.logical_shape, strict=True):
        start, stop, step = part.indices(size)
        assert step == 1, f"{spec.name}: slices have step 1, got {part}"
        resolved.append(slice(start, max(start, stop)))
    return tuple(resolved)


def _read_quantised(weight: _Weight, scale: StoredTensor, index: tuple[slice, ...], dtype: torch.dtype) -> torch.Tensor:
    """Read whole scale groups along packed columns, dequantise, then cut to the wanted columns."""
    spec = weight.spec
    assert spec.scale_block is not None, spec
    if any(part.start == part.stop for part in index):
        return torch.empty([part.stop - part.start for part in index], dtype=dtype)
    rows = _fused_rows(weight, index[0])
    is_packed = spec.granule[1] > 1
    columns, inner = index[1], slice(None)
    if is_packed:  # FP4 is read in whole scale groups, so that bytes and scales start together
        (groups,), (inner,) = cover((columns,), (spec.scale_block[1],))
        width = min(groups.stop * spec.scale_block[1], spec.logical_shape[1])
        columns = slice(groups.start * spec.scale_block[1], width)
    stored_index, _ = cover((rows, columns), spec.granule)
    scale_index, offsets = cover((rows, columns), spec.scale_block)
    lead = _leading(weight)
    values = read_slice(weight.stored, (*lead, *stored_index))[_inside(weight)]
    scales = read_slice(scale, (*lead, *scale_index))[_inside(weight)]
    plain = dequantise(values, scales, dtype, offset=(offsets[0].start, offsets[1].start))
    return plain[:, inner].contiguous()


def _locate(weight: _Weight, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """Stored coordinates of a logical slice of a plain weight."""
    return (*_leading(weight), _fused_rows(weight, index[0]), *index[1:])


def _fused_rows(weight: _Weight, rows: slice) -> slice:
    start = weight.placement.row_block * weight.spec.logical_shape[0]
    return slice(rows.start + start, rows.stop + start)


def _leading(weight: _Weight) -> tuple[slice, ...]:
    expert_id = weight.placement.expert_id
    return () if expert_id is None else (slice(expert_id, expert_id + 1),)


def _inside(weight: _Weight) -> tuple[int, ...] | slice:
    """Drops the leading expert dim of a fused tensor."""
    return slice(None) if weight.placement.expert_id is None else (0,)
