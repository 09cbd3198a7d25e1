"""Quantisers and codecs in plain torch, written as the formulas. Source: spec 2.2, 2.3, 3.2.

Every scale is a power of two, so scaling is exact and the only rounding is that of the stored element.
"""

import torch

FP8_MAX = 448.0  # largest finite E4M3 value
FP8_AMAX_FLOOR = 1e-4  # an all-zero group gets scale 2^-22 instead of 0/0
FP4_MAX = 6.0  # largest E2M1 value
FP4_AMAX_FLOOR = FP4_MAX * 2.0**-126  # smallest scale is the smallest normal fp32 number
KV_GROUP = 64  # values per scale in the non-rotary part of a cache row
FP4_GROUP = 32

_MANTISSA_BITS = 23
_UE8M0_NAN = 255
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Exponent byte of ceil2(x): the exponent field, plus one when any mantissa bit is set."""
    bits = x.float().contiguous().view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) & 0xFF
    has_mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)) != 0
    return (exponent + has_mantissa).clamp(max=_UE8M0_NAN).to(torch.uint8)


def decode_ue8m0(code: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) as fp32; 255 is NaN. Code 0 is 2^-127, a subnormal with the top mantissa bit set."""
    exponent = code.to(torch.int32)
    bits = exponent << _MANTISSA_BITS
    bits = torch.where(exponent == 0, 1 << (_MANTISSA_BITS - 1), bits)
    bits = torch.where(exponent == _UE8M0_NAN, bits | (1 << (_MANTISSA_BITS - 1)), bits)
    return bits.view(torch.float32)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code, ties to the even code (so `>` and `>=` alternate), saturating at 6."""
    a = x.float().abs()
    code = (a > 0.25).to(torch.uint8)
    for threshold, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= threshold) if tie_goes_up else (a > threshold)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Value of a 4-bit code as fp32: bit 3 is the sign, bits 2..0 index the magnitudes."""
    table = torch.tensor(
        _E2M1_MAGNITUDES + tuple(-value for value in _E2M1_MAGNITUDES), dtype=torch.float32, device=code.device
    )
    return table[code.long()]


def decode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Exact fp32 values of float8_e4m3fn. A table on CPU: torch converts element by element there, 7 ns each."""
    if values.device.type != "cpu":
        return values.float()
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    index = values.contiguous().view(torch.uint8).flatten().int()
    return table.index_select(0, index).view(values.shape)


def pack_e2m1(code: torch.Tensor) -> torch.Tensor:
    """[..., K] codes to [..., K/2] bytes: low nibble = even K, high nibble = the following odd K."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_e2m1`. Signed storage is reinterpreted first: an arithmetic shift would smear the sign."""
    raw = packed.contiguous().view(torch.uint8)
    return torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)


def quantise_fp8(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = x.float().unflatten(-1, (-1, group))  # [..., K/group, group]
    code = encode_ue8m0(grouped.abs().amax(-1).clamp(min=FP8_AMAX_FLOOR) / FP8_MAX)
    scaled = grouped / decode_ue8m0(code).unsqueeze(-1)
    values = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.flatten(-2), code


def dequantise_fp8(values: torch.Tensor, code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    grouped = decode_e4m3(values).unflatten(-1, (code.shape[-1], -1))
    return grouped.mul_(decode_ue8m0(code).unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp4(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = x.float().unflatten(-1, (-1, group))  # [..., K/group, group]
    code = encode_ue8m0(grouped.abs().amax(-1).clamp(min=FP4_AMAX_FLOOR) / FP4_MAX)
    values = encode_e2m1(grouped / decode_ue8m0(code).unsqueeze(-1))
    return pack_e2m1(values.flatten(-2)), code


def dequantise_fp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = decode_e2m1(unpack_e2m1(packed)).unflatten(-1, (scale.shape[-1], -1))
    return (values * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_index_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, code = quantise_fp8(x, x.shape[-1])
    return values, decode_ue8m0(code).squeeze(-1)


def dequantise_index_fp8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (decode_e4m3(values) * scale.unsqueeze(-1)).to(dtype)


def fake_quant_kv(kv: torch.Tensor, rope_dim: int) -> torch.Tensor:
    nope = kv[..., : kv.shape[-1] - rope_dim]
    rope = kv[..., kv.shape[-1] - rope_dim :]
    values, code = quantise_fp8(nope, KV_GROUP)
    return torch.cat((dequantise_fp8(values, code, kv.dtype), rope.to(torch.bfloat16).to(kv.dtype)), dim=-1)


def dequantise_block_fp8(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: int, offset: tuple[int, int]
) -> torch.Tensor:
    rows = (torch.arange(values.shape[0], device=values.device) + offset[0]) // block
    columns = (torch.arange(values.shape[1], device=values.device) + offset[1]) // block
    return (decode_e4m3(values) * scale[rows][:, columns]).to(dtype)
