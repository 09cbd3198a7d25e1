"""Device functions of the sampling noise; bit for bit the numbers of reference.py. Source: Steele, Lea, Flood 2014."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(-7046029254386353131)  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = tl.constexpr(-4658895280553007687)  # 0xBF58476D1CE4E5B9
_MIX_2 = tl.constexpr(-7723592293110705685)  # 0x94D049BB133111EB


@triton.jit
def mix64(x):
    """The splitmix64 finaliser on int64; the masks make the shifts logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def noise_state(seed, position):
    """State of a row. seed, position: int64 scalars."""
    return mix64(mix64(seed) + position * _GOLDEN)


@triton.jit
def noise_bits(state, token_ids):
    """The 32 random bits of each token, as int64. token_ids: int64."""
    return (mix64(state + (token_ids + 1) * _GOLDEN) >> 32) & 0xFFFFFFFF


@triton.jit
def noise_bits_from(state, first, lane):
    """`noise_bits` of tokens first + lane: the products with lane stay outside of a loop over first. lane: int32."""
    start = state + (first + 1).to(tl.int64) * _GOLDEN
    return (mix64(start + lane.to(tl.int64) * _GOLDEN) >> 32) & 0xFFFFFFFF


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise in fp32 from 32 bits: two logarithms in fp64, one rounding."""
    rest = 1.0 - (bits.to(tl.float64) + 0.5) * (2.0**-32)  # exact
    return (-tl.log(-tl.log(rest))).to(tl.float32)
