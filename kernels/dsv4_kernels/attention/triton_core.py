"""Device functions that decode and prefill attention share: rows of keys, one step of the softmax, the end of a query.

Heads are the tensor core's rows, 64 of them, and a block of 64 keys its other operand: S = Q K^T, then O += P K, with
K in shared memory once for both. Two groups of four warps hold the sums of 512 columns for 64 heads, 128 registers a
thread. Slots and rows of the next blocks are copied asynchronously, `Step` says how early.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4_kernels.attention.keys import Ending
from dsv4_kernels.quant.triton_codec import fp8_group_code, to_e4m3

DIM = tl.constexpr(512)
NOPE = tl.constexpr(448)
GROUP = tl.constexpr(64)  # E4M3 values of a row per scale
OUT_GROUP = tl.constexpr(128)  # values of the result per scale
ROW_BYTES = tl.constexpr(576)  # E4M3 and bf16 values of a kv_fp8 row; the scales follow behind all rows of a page
SCALE_BYTES = tl.constexpr(8)
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)


class Step(NamedTuple):
    """One pass of the loop over keys."""

    keys: int  # 32 or 64; the scores read the queries from shared memory once per step
    stages: int  # 3: rows are asked for at the end of the step before, slots a step earlier; 5: twice as early


DEFAULT_STEP = Step(64, 3)  # with 5 stages 64 keys of FP8 rows spill, of bf16 rows exceed the shared memory


def empty_fp8(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of E4M3 values [T, H * 512] and scale bytes [T, H * 4], for `store_result`."""
    num_tokens, num_columns = q.shape[0], q.shape[1] * q.shape[2]
    values = torch.empty((num_tokens, num_columns), dtype=torch.float8_e4m3fn, device=q.device)
    return values, torch.empty((num_tokens, num_columns // OUT_GROUP.value), dtype=torch.uint8, device=q.device)


def turns_of(ending: Ending) -> torch.Tensor | None:
    """[T, 32, 2] fp32, the rotations of the queries' positions."""
    return None if ending.cis is None else torch.view_as_real(ending.cis).contiguous()


@triton.jit
def load_queries(q, token, head, num_heads):
    """[HEADS, 512] bf16, zero beyond the last head."""
    at = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(q + token * num_heads * DIM + at, mask=(head < num_heads)[:, None], other=0.0)


@triton.jit
def column_limit(count, token, columns):
    """Columns of this token's slots that may name rows."""
    limit = columns
    if count is not None:
        limit = tl.minimum(tl.maximum(tl.load(count + token), 0), columns).to(tl.int32)
    return limit


@triton.jit
def named_rows(slots, begin, limit, num_slots, KEYS: tl.constexpr):
    """Slots of columns begin .. begin + KEYS - 1 as uint32, and which of them name rows; 0 for those that do not."""
    column = begin + tl.arange(0, KEYS)
    slot = tl.load(slots + column, mask=column < limit, other=0)
    is_row = (column < limit) & (slot.to(tl.uint64) < tl.cast(num_slots, tl.uint64))  # a negative one is a large one
    return tl.where(is_row, slot, 0).to(tl.uint32), is_row  # divided in 32 bits; offsets in bytes need 64


@triton.jit
def pool_rows(values, slot, page, in_page, is_row, rows, page_units, KIND: tl.constexpr):
    """Rows `slot` as bf16 [KEYS, 512]; zero where `is_row` is not set, and nothing is read there.

    rows: of a page. page_units: from one page to the next, in units of ROW_BYTES; both are for "kv_fp8".
    """
    column = tl.arange(0, DIM)[None, :]
    mask = is_row[:, None]
    if KIND == "plain":
        keys = tl.load(values + slot.to(tl.int64)[:, None] * DIM + column, mask=mask, other=0.0)
    else:
        tail = values.to(tl.pointer_type(tl.bfloat16))
        scales = values.to(tl.pointer_type(tl.int64))
        unit = (page * page_units + in_page).to(tl.int64)  # of ROW_BYTES
        e4m3 = tl.load(values + (unit * ROW_BYTES)[:, None] + column, mask=mask & (column < NOPE), other=0.0)
        at = unit * (ROW_BYTES // 2) + NOPE // 2
        rope = tl.load(tail + at[:, None] + tl.arange(0, GROUP)[None, :], mask=mask, other=0.0)
        # The scales of a row are one word, so that they can be fetched ahead as the values are.
        at = (page.to(tl.int64) * page_units + rows) * (ROW_BYTES // SCALE_BYTES) + in_page
        word = tl.load(scales + at, mask=is_row, other=0)
        group = tl.arange(0, DIM // GROUP)
        code = (word[:, None] >> (8 * group)[None, :]).to(tl.uint8).to(tl.uint16)
        factor = (code << 7).to(tl.bfloat16, bitcast=True)  # a power of two: the product is exact
        groups = e4m3.reshape(slot.shape[0], DIM // GROUP, GROUP).to(tl.float32).to(tl.bfloat16) * factor[:, :, None]
        # Added, not chosen: a choice costs registers. A rotary part of NaN then shows in all columns.
        one = tl.where(group < NOPE // GROUP, 0.0, 1.0).to(tl.bfloat16)
        keys = (groups + rope[:, None, :] * one[None, :, None]).reshape(slot.shape[0], DIM)
    return keys


@triton.jit
def attend(q, o, top, total, keys, is_row, scale, always):
    """One block of keys. top, total: [HEADS], running; o: [HEADS, 512], scaled to `top`. always: true.

    Both branches are one product. Triton gives all warps of a product whose result reaches another product different
    rows, of which there are too few here, and both groups of warps would do the same; behind a branch it does not see
    the second product and gives each group half of the keys.
    """
    if always:
        logits = tl.dot(q, tl.trans(keys))
    else:
        logits = tl.dot(q, tl.trans(keys))
    logits = tl.where(is_row[None, :], logits * scale, float("-inf"))  # [HEADS, KEYS]
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(logits - new_top[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    o = tl.dot(weights.to(tl.bfloat16), keys, o * shrink[:, None])
    return o, new_top, total


@triton.jit
def with_sink(o, top, total, sink, head, num_heads):
    """The sums over their denominator, the sink's raw logit added to it once; zero for a query without keys."""
    if sink is not None:
        raw = tl.maximum(tl.load(sink + head, mask=head < num_heads, other=0.0) * LOG2_E, LOWEST)
        new_top = tl.maximum(top, raw)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(raw - new_top)
        o *= shrink[:, None]
    return o / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def rotate_back(value, cis, token, HEADS: tl.constexpr):
    """The last 64 columns as 32 pairs, turned by the conjugates of cis[token]. value: [HEADS, 512] fp32."""
    pair = tl.arange(0, DIM // 2) - NOPE // 2
    cos = tl.load(cis + token * (DIM - NOPE) + 2 * pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(cis + token * (DIM - NOPE) + 2 * pair + 1, mask=pair >= 0, other=0.0)[None, :]
    even, odd = tl.split(value.reshape(HEADS, DIM // 2, 2))
    is_turned = (pair >= 0)[None, :]
    turned_even = tl.where(is_turned, even * cos + odd * sin, even)
    turned_odd = tl.where(is_turned, odd * cos - even * sin, odd)
    return tl.join(turned_even, turned_odd).reshape(HEADS, DIM)


@triton.jit
def store_result(value, out, codes, token, head, num_heads, HEADS: tl.constexpr):
    """Rounded once: to bf16, or with `codes` to E4M3 with a scale byte per 128 columns. value: [HEADS, 512] fp32."""
    out += token * num_heads * DIM
    at = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    mask = (head < num_heads)[:, None]
    if codes is None:
        tl.store(out + at, value.to(tl.bfloat16), mask=mask)
    else:
        groups = value.reshape(HEADS, DIM // OUT_GROUP, OUT_GROUP)
        code = fp8_group_code(tl.max(tl.abs(groups), axis=2))
        tl.store(out + at, to_e4m3(groups, code[:, :, None]).reshape(HEADS, DIM), mask=mask)
        codes += token * num_heads * (DIM // OUT_GROUP)
        group = head[:, None] * (DIM // OUT_GROUP) + tl.arange(0, DIM // OUT_GROUP)[None, :]
        tl.store(codes + group, code.to(tl.uint8), mask=mask)
