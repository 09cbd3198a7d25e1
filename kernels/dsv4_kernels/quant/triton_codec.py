"""Device functions of the number formats, for kernels that quantise what they have just computed. Source: spec 3.2."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def ue8m0_code(x):
    """Exponent byte of the smallest power of two at or above x, as int32. x: positive, finite fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """2^exponent as fp32. exponent: int32 in -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_group_code(amax):
    """Scale byte of a group of E4M3 values with this largest magnitude, as int32; 1e-4 is the floor of spec 3.2."""
    return ue8m0_code(tl.div_rn(tl.maximum(amax, 1e-4), 448.0))


@triton.jit
def to_e4m3(x, code):
    """x over the scale of `code`, saturated and rounded to E4M3. code: of groups whose amax is at least 1e-4."""
    scaled = x * power_of_two(127 - code)
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)
