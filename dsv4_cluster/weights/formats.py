"""Number formats of stored weights: which one a tensor has, and back to plain values.

The format follows from the stored dtype and shape, never from the config: repacked checkpoints exist whose config
says otherwise. Source: spec 2.2, 2.3.
"""

from dataclasses import dataclass, replace

import torch

from dsv4_cluster.weights.inventory import FP4_BLOCK, FP4_PER_BYTE, FP8_BLOCK, TensorSpec
from dsv4_kernels.quant.op import dequantise_block_fp8, dequantise_fp4

SCALE_DTYPES = ("F8_E8M0", "F32")
_PLAIN_FLOATS = ("BF16", "F32")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """granule: logical elements per stored element along each dim. scale_block: elements that share one scale."""

    granule: tuple[int, int]
    scale_block: tuple[int, int]


FP8 = WeightFormat((1, 1), FP8_BLOCK)
FP4 = WeightFormat((1, FP4_PER_BYTE), FP4_BLOCK)


def allowed_dtypes(spec: TensorSpec) -> tuple[str, ...]:
    """Stored dtypes that a weight of the inventory may have, the official one first."""
    if spec.dtype == "I64":
        return ("I64",)
    quantised = {"I8": ("I8", "F8_E4M3"), "F8_E4M3": ("F8_E4M3", "I8") if spec.expert_id is not None else ("F8_E4M3",)}
    plain = ("F32", "BF16") if spec.dtype == "F32" else _PLAIN_FLOATS
    return (*quantised.get(spec.dtype, ()), *plain)


def as_stored(spec: TensorSpec, dtype: str) -> TensorSpec:
    """The spec of the same weight when it is stored with `dtype`, one of `allowed_dtypes`."""
    if dtype not in ("F8_E4M3", "I8"):
        plain = (1,) * len(spec.logical_shape)
        return replace(spec, dtype=dtype, shape=spec.logical_shape, granule=plain, scale_block=None)
    fmt = FP4 if dtype == "I8" else FP8
    shape = tuple(size // step for size, step in zip(spec.logical_shape, fmt.granule, strict=True))
    return replace(spec, dtype=dtype, shape=shape, granule=fmt.granule, scale_block=fmt.scale_block)


def cover(index: tuple[slice, ...], granule: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Widen a slice to whole granules.

    Returns: the covering slices in granules, and where `index` lies inside what they cover.
    """
    covering = tuple(slice(p.start // g, -(-p.stop // g)) for p, g in zip(index, granule, strict=True))
    inner = tuple(
        slice(p.start - c.start * g, p.stop - c.start * g) for p, c, g in zip(index, covering, granule, strict=True)
    )
    return covering, inner


def dequantise(
    stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, offset: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Plain values of a quantised slice.

    stored: [out, in] float8_e4m3fn, or [out, in/2] int8 of packed FP4 whose columns start at a scale group.
    scale: the scales that cover it, float8_e8m0fnu or fp32. offset: FP8 only, position inside the first block.
    Returns: [out, in] of `dtype`.
    """
    if stored.dtype == torch.float8_e4m3fn:
        return dequantise_block_fp8(stored, scale, dtype, offset=offset)
    return dequantise_fp4(stored, scale, dtype)
