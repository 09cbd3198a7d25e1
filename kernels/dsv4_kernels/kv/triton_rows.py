"""Device functions on one cache row: normalise, rotate, round to a format and store. The row is in registers.

A row is padded to BLOCK, a power of two; what is beyond D is zero. `values`, `tail` and `codes` are views of one pool's
bytes, see `pool_views`; the layout is that of `rows.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.quant.triton_codec import fp4_group_code, fp8_group_code, power_of_two, to_e2m1, to_e4m3

KV_GROUP = tl.constexpr(64)
FP4_GROUP = tl.constexpr(32)


class PoolViews(NamedTuple):
    """A pool's memory as the kernels address it."""

    values: torch.Tensor  # E4M3 or plain values, packed E2M1 bytes
    tail: torch.Tensor  # kv_fp8: the rotary part in bf16; index_fp8: scales in fp32; otherwise unused
    codes: torch.Tensor  # bytes, for UE8M0 scales
    num_slots: int
    page_bytes: int


def pool_views(pool: PagedRows) -> PoolViews:
    """See `PoolViews`; nothing is copied."""
    pages, kind = pool.pages, pool.format.kind
    values = {"plain": pool.format.dtype, "kv_fp8": torch.float8_e4m3fn, "index_fp8": torch.float8_e4m3fn}.get(kind)
    tail = {"kv_fp8": torch.bfloat16, "index_fp8": torch.float32}.get(kind)
    return PoolViews(
        pages if values is None else pages.view(values),
        pages if tail is None else pages.view(tail),
        pages,
        pool.num_pages * pool.rows_per_page,
        pages.shape[1],
    )


@triton.jit
def norm_row(row, weight, eps, D: tl.constexpr, BLOCK: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """RMSNorm in fp32. row: [BLOCK] fp32."""
    normed = row * tl.rsqrt(tl.sum(row * row, axis=0) / D + eps)
    if HAS_WEIGHT:
        column = tl.arange(0, BLOCK)
        normed *= tl.load(weight + column, mask=column < D, other=0.0)
    return normed


@triton.jit
def rotate_row(row, cis, sign, D: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate the last PAIRS pairs. row: [BLOCK] fp32. cis: cosine and sine of each pair. sign: -1.0 rotates back."""
    pair = tl.arange(0, BLOCK // 2) - (D // 2 - PAIRS)
    is_turned = (pair >= 0) & (pair < PAIRS)
    cos = tl.load(cis + 2 * pair, mask=is_turned, other=1.0)
    sin = tl.load(cis + 2 * pair + 1, mask=is_turned, other=0.0) * sign
    even, odd = tl.split(row.reshape(BLOCK // 2, 2))
    turned_even = tl.where(is_turned, even * cos - odd * sin, even)  # where: times 1 would lose the sign of a zero
    turned_odd = tl.where(is_turned, even * sin + odd * cos, odd)
    return tl.join(turned_even, turned_odd).reshape(BLOCK)


@triton.jit
def hadamard_row(row, BLOCK: tl.constexpr):
    """Orthonormal Sylvester-Hadamard transform. row: [BLOCK] fp32, BLOCK a power of two from 32 to 256.

    In two steps, because the matrix of 16 m is the Kronecker product of those of m and of 16.
    """
    OUTER: tl.constexpr = BLOCK // 16
    tile = row.reshape(OUTER, 1, 16)
    tile = tl.sum(tile * _signs(16)[None, :, :], axis=2)  # [OUTER, 16]
    tile = tl.sum(tile[None, :, :] * _signs(OUTER)[:, :, None], axis=1)
    return tile.reshape(BLOCK) * (BLOCK**-0.5)


@triton.jit
def _signs(N: tl.constexpr):
    """[N, N] fp32, -1 where the bits that row and column share are an odd number, else 1. N at most 16."""
    bits = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return (1 - 2 * (bits & 1)).to(tl.float32)


@triton.jit
def store_row(
    row, slot, values, tail, codes, num_slots, page_bytes,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Round `row` to the pool's format and store it; a slot below 0 or beyond the pool stores nothing.

    row: [BLOCK] fp32. slot: int64 scalar. ROWS: rows per page. Returns: the row as the pool reads back ("plain",
    "kv_fp8"), or the row itself.
    """
    column = tl.arange(0, BLOCK)
    is_slot = (slot >= 0) & (slot < num_slots)
    page = (slot // ROWS) * page_bytes
    in_page = slot % ROWS
    if KIND == "plain":
        rounded = row.to(values.dtype.element_ty)
        size: tl.constexpr = values.dtype.element_ty.primitive_bitwidth // 8
        tl.store(values + page // size + in_page * D + column, rounded, mask=(column < D) & is_slot)
        row = rounded.to(tl.float32)
    elif KIND == "kv_fp8":
        nope: tl.constexpr = D - ROPE
        width: tl.constexpr = nope + 2 * ROPE
        num_groups: tl.constexpr = BLOCK // KV_GROUP
        scale_bytes: tl.constexpr = (nope // KV_GROUP + 7) // 8 * 8
        data = page + in_page * width
        groups = row.reshape(num_groups, KV_GROUP)
        code = fp8_group_code(tl.max(tl.abs(groups), axis=1))
        rounded = to_e4m3(groups, code[:, None])
        tl.store(values + data + column, rounded.reshape(BLOCK), mask=(column < nope) & is_slot)
        is_tail = (column >= nope) & (column < D)
        narrow = row.to(tl.bfloat16)
        tl.store(tail + (data + nope) // 2 + column - nope, narrow, mask=is_tail & is_slot)
        byte = tl.arange(0, num_groups)
        stored = tl.where(byte < nope // KV_GROUP, code, 0).to(tl.uint8)
        scales = codes + page + ROWS * width + in_page * scale_bytes
        tl.store(scales + byte, stored, mask=(byte < scale_bytes) & is_slot)
        if num_groups < scale_bytes:
            padding = tl.arange(0, 8)
            tl.store(scales + num_groups + padding, padding * 0, mask=(padding < scale_bytes - num_groups) & is_slot)
        restored = (rounded.to(tl.float32) * power_of_two(code - 127)[:, None]).reshape(BLOCK)
        row = tl.where(is_tail, narrow.to(tl.float32), restored)
    elif KIND == "index_fp8":
        code = fp8_group_code(tl.max(tl.abs(row), axis=0))
        tl.store(values + page + in_page * D + column, to_e4m3(row, code), mask=(column < D) & is_slot)
        tl.store(tail + (page + ROWS * D) // 4 + in_page, power_of_two(code - 127), mask=is_slot)
    else:
        tl.static_assert(KIND == "index_fp4")
        groups = row.reshape(BLOCK // FP4_GROUP, FP4_GROUP)
        code = fp4_group_code(tl.max(tl.abs(groups), axis=1))
        even, odd = tl.split(to_e2m1(groups, code[:, None]).reshape(BLOCK // 2, 2))
        byte = tl.arange(0, BLOCK // 2)
        packed = (even | (odd << 4)).to(tl.uint8)
        tl.store(values + page + in_page * (D // 2) + byte, packed, mask=(byte < D // 2) & is_slot)
        group = tl.arange(0, BLOCK // FP4_GROUP)
        scales = codes + page + ROWS * (D // 2) + in_page * (D // FP4_GROUP)
        tl.store(scales + group, code.to(tl.uint8), mask=(group < D // FP4_GROUP) & is_slot)
    return row
