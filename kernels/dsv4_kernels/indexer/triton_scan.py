"""Scores of paged keys on the tensor cores, and the largest of every group of neighbours."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from dsv4_kernels.indexer.triton_select import GROUP, LOWEST
from dsv4_kernels.quant.triton_codec import fp8_group_code, power_of_two, to_e4m3

_FP4_GROUP = tl.constexpr(32)
_UNIT_EXPONENT = tl.constexpr(2.0**126)  # what an E2M1 code in the bits of fp32 is short of


@triton.jit
def scan_kernel(
    q, weights, values, scales, codes, page_table, seqs, num_visible, scores, maxima, columns, width, stride, topk,
    PAGE_BYTES: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    KIND: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One chunk of one token. Keys are the rows of the product, heads its columns: a key's sum stays in few lanes."""
    token = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * (TILE * TILES)
    visible = tl.minimum(tl.load(num_visible + token).to(tl.int32), width)
    if (visible > topk) & (first < visible):
        pages = page_table + tl.load(seqs + token).to(tl.int64) * columns
        head = tl.arange(0, HEADS)
        weight = tl.load(weights + token * H + head, mask=head < H, other=0.0)
        scores += token * width
        maxima += token * stride
        column = tl.arange(0, D)
        at = q + token * (H * D) + head[:, None] * D + column[None, :]
        query = tl.load(at, mask=(head < H)[:, None], other=0.0)
        if KIND == "index_fp8":
            query = query.to(tl.float32)
            code = fp8_group_code(tl.max(tl.abs(query), axis=1))  # rounded already: this loses nothing
            narrow = to_e4m3(query, code[:, None]).trans()
            weight *= power_of_two(code - 127)
            for tile in range(tl.minimum(TILES, tl.cdiv(visible - first, TILE))):
                entry = first + tile * TILE + tl.arange(0, TILE)
                page = tl.load(pages + entry // ROWS, mask=entry < visible, other=0).to(tl.int64) * PAGE_BYTES
                data = page[:, None] + (entry % ROWS * D)[:, None] + column[None, :]
                keys = tl.load(values + data, mask=(entry < visible)[:, None], other=0.0)
                scale = tl.load(scales + (page + ROWS * D) // 4 + entry % ROWS, mask=entry < visible, other=0.0)
                products = tl.dot(keys, narrow)
                score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1) * scale
                _store(scores, maxima, first + tile * TILE, visible, score, TILE)
        else:
            tl.static_assert(KIND == "index_fp4")
            byte = tl.arange(0, D // 2)
            even, odd = tl.split(query.to(tl.bfloat16).reshape(HEADS, D // 2, 2))
            group = tl.arange(0, D // _FP4_GROUP)
            for tile in range(tl.minimum(TILES, tl.cdiv(visible - first, TILE))):
                entry = first + tile * TILE + tl.arange(0, TILE)
                is_entry = (entry < visible)[:, None]
                page = tl.load(pages + entry // ROWS, mask=entry < visible, other=0).to(tl.int64) * PAGE_BYTES
                at_data = values + page[:, None] + (entry % ROWS * (D // 2))[:, None] + byte[None, :]
                data = tl.load(at_data, mask=is_entry, other=0).to(tl.int32)
                at_scale = codes + (page + ROWS * (D // 2) + entry % ROWS * (D // _FP4_GROUP))[:, None] + group[None, :]
                scale = power_of_two(tl.load(at_scale, mask=is_entry, other=0).to(tl.int32) - 127)
                products = tl.dot(_keys(data, scale, TILE, D), even.trans())
                products = tl.dot(_keys(data >> 4, scale, TILE, D), odd.trans(), products)
                score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1)
                _store(scores, maxima, first + tile * TILE, visible, score, TILE)


@triton.jit
def _keys(nibbles, scale, TILE: tl.constexpr, D: tl.constexpr):
    """E2M1 codes in the low four bits to bf16, exactly. nibbles: [TILE, D / 2] int32. scale: [TILE, D / 32] fp32."""
    bits = ((nibbles & 7) << 22) | ((nibbles & 8) << 28)
    unscaled = bits.to(tl.float32, bitcast=True) * _UNIT_EXPONENT
    grouped = unscaled.reshape(TILE, D // _FP4_GROUP, _FP4_GROUP // 2) * scale[:, :, None]
    return grouped.reshape(TILE, D // 2).to(tl.bfloat16)


@triton.jit
def _store(scores, maxima, first, visible, score, TILE: tl.constexpr):
    """Store scores as int32 that order like them, both zeros equal, and the maximum of every group."""
    entry = first + tl.arange(0, TILE)
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(entry < visible, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
    tl.store(scores + entry, ordered, mask=entry < visible)
    group = first // GROUP + tl.arange(0, TILE // GROUP)
    tl.store(maxima + group, tl.max(ordered.reshape(TILE // GROUP, GROUP), axis=1), mask=group * GROUP < visible)
