"""Public quantisation ops: checks and dispatch; the formulas are in reference.py. Source: spec 2.2, 2.3, 3.2."""

from dataclasses import dataclass

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.quant import reference

_WEIGHT_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations as `quantise_fp8(x, 128)` gives them."""

    values: torch.Tensor  # [T, K] float8_e4m3fn
    scales: torch.Tensor  # [T, K / 128] uint8, UE8M0


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two at or above x as its exponent byte, by exponent bit arithmetic.

    x: [...] positive floats. Returns: [...] uint8, value 2^(byte - 127); NaN, inf and overflow give 255 (NaN).
    """
    return reference.encode_ue8m0(x)


def decode_ue8m0(code: torch.Tensor) -> torch.Tensor:
    """Value of scale bytes. code: [...] uint8 or float8_e8m0fnu (reinterpreted). Returns: [...] fp32."""
    return reference.decode_ue8m0(_scale_bytes(code))


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest 4-bit codes, ties to even, saturating at 6. x: [...] float. Returns: [...] uint8 in 0..15."""
    return reference.encode_e2m1(x)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Values of 4-bit codes. code: [...] integers in 0..15. Returns: [...] fp32."""
    return reference.decode_e2m1(code)


def pack_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Two codes per byte, even index in the low nibble. code: [..., K] uint8. Returns: [..., K/2] uint8."""
    _check_groups(code, 2)
    return reference.pack_e2m1(code)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_e2m1`. packed: [..., K/2] uint8 or int8. Returns: [..., K] uint8."""
    return reference.unpack_e2m1(packed)


def quantise_fp8(x: torch.Tensor, group: int, *, impl: str = AUTO) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dim in groups to E4M3 with one power-of-two scale each, amax floored at 1e-4.

    x: [..., K] float. Returns: values [..., K] float8_e4m3fn; scale bytes [..., K/group] uint8.
    Raises: ValueError when K is not a multiple of `group`.
    """
    _check_groups(x, group)
    quantised: tuple[torch.Tensor, torch.Tensor] = implementation("quant", x.device, x.dtype, impl).quantise_fp8(
        x, group
    )
    return quantised


def dequantise_fp8(
    values: torch.Tensor, code: torch.Tensor, dtype: torch.dtype = torch.float32, *, impl: str = AUTO
) -> torch.Tensor:
    """Inverse of `quantise_fp8`; the group size follows from the shapes.

    values: [..., K] float8_e4m3fn. code: [..., K/group] uint8. Returns: [..., K] of `dtype`.
    """
    _check_groups(values, code.shape[-1])
    module = implementation("quant", values.device, values.dtype, impl)
    return module.dequantise_fp8(values, _scale_bytes(code), dtype)


def quantise_fp4(
    x: torch.Tensor, group: int = reference.FP4_GROUP, *, impl: str = AUTO
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dim in groups to packed E2M1 with one power-of-two scale each, amax floored at 6 * 2^-126.

    x: [..., K] float. Returns: packed [..., K/2] uint8; scale bytes [..., K/group] uint8.
    Raises: ValueError when K is not a multiple of `group` or `group` is odd.
    """
    _check_groups(x, group)
    if group % 2:
        raise ValueError(f"group {group} is odd: two values share a byte")
    return implementation("quant", x.device, x.dtype, impl).quantise_fp4(x, group)


def dequantise_fp4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, *, impl: str = AUTO
) -> torch.Tensor:
    """Inverse of `quantise_fp4`, also the dequantiser of MXFP4 weights; the group size follows from the shapes.

    packed: [..., K/2] uint8 or int8. scale: [..., K/group] uint8 or float8_e8m0fnu bytes, or fp32 multipliers.
    Returns: [..., K] of `dtype`.
    """
    if packed.shape[-1] * 2 % scale.shape[-1]:
        raise ValueError(f"{scale.shape[-1]} scales do not divide {packed.shape[-1] * 2} values")
    module = implementation("quant", packed.device, packed.dtype, impl)
    return module.dequantise_fp4(packed, _multiplier(scale), dtype)


def quantise_index_fp8(x: torch.Tensor, *, impl: str = AUTO) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise indexer rows to E4M3 with one fp32 power-of-two scale per row, amax floored at 1e-4.

    x: [..., dim] float. Returns: values [..., dim] float8_e4m3fn; scale [...] fp32.
    """
    return implementation("quant", x.device, x.dtype, impl).quantise_index_fp8(x)


def dequantise_index_fp8(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, *, impl: str = AUTO
) -> torch.Tensor:
    """Inverse of `quantise_index_fp8`. values: [..., dim]; scale: [...]. Returns: [..., dim] of `dtype`."""
    module = implementation("quant", values.device, values.dtype, impl)
    return module.dequantise_index_fp8(values, scale, dtype)


def fake_quant_kv(kv: torch.Tensor, rope_dim: int, *, impl: str = AUTO) -> torch.Tensor:
    """A cache row as it reads back from an FP8 cache: E4M3 in groups of 64, the rotary tail rounded to bf16.

    kv: [..., dim] float, already rotated. Returns: [..., dim] of the same dtype.
    Raises: ValueError when dim - rope_dim is not a multiple of 64. Source: spec 4.3, 6.1.
    """
    if (kv.shape[-1] - rope_dim) % reference.KV_GROUP:
        raise ValueError(f"{kv.shape[-1]} - {rope_dim} dims are not a multiple of {reference.KV_GROUP}")
    return implementation("quant", kv.device, kv.dtype, impl).fake_quant_kv(kv, rope_dim)


def fake_quant_index(x: torch.Tensor, kind: str, *, impl: str = AUTO) -> torch.Tensor:
    """An indexer query or key as it reads back from the cache.

    x: [..., dim] float. kind: "auto" (unchanged), "fp8" (one group) or "fp4" (groups of 32).
    Returns: [..., dim] of the same dtype. Raises: ValueError on another kind.
    """
    if kind == "auto":
        return x
    if kind == "fp8":
        values, scale = quantise_index_fp8(x, impl=impl)
        return dequantise_index_fp8(values, scale, x.dtype, impl=impl)
    if kind == "fp4":
        packed, code = quantise_fp4(x, impl=impl)
        return dequantise_fp4(packed, code, x.dtype, impl=impl)
    raise ValueError(f"indexer precision is {kind!r}, expected 'auto', 'fp8' or 'fp4'")


def dequantise_block_fp8(
    values: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    block: int = _WEIGHT_BLOCK,
    offset: tuple[int, int] = (0, 0),
    impl: str = AUTO,
) -> torch.Tensor:
    """Dequantise a weight, or a slice of one, with one scale per block x block tile.

    values: [out, in] float8_e4m3fn. scale: [tiles, tiles] that cover the slice, uint8 or float8_e8m0fnu bytes, or
    fp32 multipliers. offset: row and column of values[0, 0] within the first tile. Returns: [out, in] of `dtype`.
    Raises: ValueError when the scales do not cover the values exactly. Source: spec 2.2.
    """
    expected = tuple(-(-(size + start) // block) for size, start in zip(values.shape, offset, strict=True))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale has shape {tuple(scale.shape)}, expected {expected} for {tuple(values.shape)}")
    module = implementation("quant", values.device, values.dtype, impl)
    return module.dequantise_block_fp8(values, _multiplier(scale), dtype, block, offset)


def _check_groups(x: torch.Tensor, group: int) -> None:
    if x.shape[-1] % group:
        raise ValueError(f"last dim {x.shape[-1]} is not a multiple of {group}")


def _scale_bytes(code: torch.Tensor) -> torch.Tensor:
    """Reinterpret, never convert: a numeric copy of e8m0 into bytes destroys it."""
    return code.view(torch.uint8) if code.dtype == torch.float8_e8m0fnu else code


def _multiplier(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.dtype == torch.float32 else decode_ue8m0(scale)
