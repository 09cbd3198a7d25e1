"""Device functions of the number formats, for kernels that quantise what they have just computed. Source: spec 3.2."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

_FP8_AMAX_FLOOR = tl.constexpr(1e-4)
_FP4_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-126)


@triton.jit
def power_of_two(exponent):
    """2^exponent as fp32. exponent: int32 in -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_group_code(amax):
    """Scale byte of a group of E4M3 values, as int32: ceil2(amax / 448) from the bits, since 448 = 1.75 * 2^8."""
    bits = tl.maximum(amax, _FP8_AMAX_FLOOR).to(tl.int32, bitcast=True)
    return (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def fp4_group_code(amax):
    """Scale byte of a group of E2M1 values, as int32: ceil2(amax / 6) from the bits, since 6 = 1.5 * 2^2."""
    bits = tl.maximum(amax, _FP4_AMAX_FLOOR).to(tl.int32, bitcast=True)
    return (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)


@triton.jit
def to_e4m3(x, code):
    """x over the scale of `code`, rounded to E4M3; the cast saturates and keeps NaN."""
    return (x * power_of_two(127 - code)).to(tl.float8e4nv)


@triton.jit
def to_e2m1(x, code):
    """x over the scale of `code` as 4-bit codes in int32: nearest, ties to even, saturating at 6."""
    scaled = x * power_of_two(127 - code)
    a = tl.abs(scaled)
    bits = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    bits += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return bits | (((scaled.to(tl.int32, bitcast=True) >> 31) & 1) << 3)
