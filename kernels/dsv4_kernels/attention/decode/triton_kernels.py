"""Device code of decode attention. Heads are the tensor core's rows, 64 of them; keys and values its other operand.

A row is read in blocks of 256, 128, 64 and 64 columns: the first three are E4M3 with a scale per 64, the last is bf16.
Each block is key and value: S += Q block^T, then O = P block. A program sums half of the value columns: the sums of all
512 for 64 heads do not fit the registers beside a block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from dsv4_kernels.triton_pdl import start_next, wait_for_previous

DIM = tl.constexpr(512)
NOPE = tl.constexpr(448)
GROUP = tl.constexpr(64)
ROW_BYTES = tl.constexpr(576)  # E4M3 and bf16 values of a kv_fp8 row; the scales follow behind all rows of a page
SCALE_BYTES = tl.constexpr(8)
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_kernel(
    q, values0, tail0, codes0, slots0, count0, columns0, num_slots0, page_bytes0, page_values0,
    values1, tail1, codes1, slots1, count1, columns1, num_slots1, page_bytes1, page_values1,
    acc, state, blocks_per_split, num_tokens, num_heads, scale,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, KIND0: tl.constexpr, KIND1: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, HAS_SECOND: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one token: unnormalised sums [HEADS, 256], largest logit and sum of numerators.

    Grid: (splits, tokens, 2 * head blocks); even programs of the last axis sum columns 0 .. 255, odd ones the others.
    """
    wait_for_previous(USE_PTX)
    if tl.program_id(2) % 2 == 0:
        _split(
            q, values0, tail0, codes0, slots0, count0, columns0, num_slots0, page_bytes0, page_values0,
            values1, tail1, codes1, slots1, count1, columns1, num_slots1, page_bytes1, page_values1,
            acc, state, blocks_per_split, num_tokens, num_heads, scale,
            ROWS0, ROWS1, KIND0, KIND1, HEADS, KEYS, HAS_SECOND, USE_PTX, True,
        )  # fmt: skip
    else:
        _split(
            q, values0, tail0, codes0, slots0, count0, columns0, num_slots0, page_bytes0, page_values0,
            values1, tail1, codes1, slots1, count1, columns1, num_slots1, page_bytes1, page_values1,
            acc, state, blocks_per_split, num_tokens, num_heads, scale,
            ROWS0, ROWS1, KIND0, KIND1, HEADS, KEYS, HAS_SECOND, USE_PTX, False,
        )  # fmt: skip


@triton.jit
def _split(
    q, values0, tail0, codes0, slots0, count0, columns0, num_slots0, page_bytes0, page_values0,
    values1, tail1, codes1, slots1, count1, columns1, num_slots1, page_bytes1, page_values1,
    acc, state, blocks_per_split, num_tokens, num_heads, scale,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, KIND0: tl.constexpr, KIND1: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, HAS_SECOND: tl.constexpr, USE_PTX: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) // 2 * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    row = q + (token * num_heads + head)[:, None] * DIM
    qa = tl.load(row + tl.arange(0, 256)[None, :], mask=is_head[:, None], other=0.0)
    qb = tl.load(row + 256 + tl.arange(0, 128)[None, :], mask=is_head[:, None], other=0.0)
    qc = tl.load(row + 384 + tl.arange(0, 64)[None, :], mask=is_head[:, None], other=0.0)
    qd = tl.load(row + 448 + tl.arange(0, 64)[None, :], mask=is_head[:, None], other=0.0)
    # LOW: one block of 256 columns. Otherwise 128, 64 and 64; the two that LOW has no use for are not in its loop.
    ox = tl.zeros((HEADS, 256 if LOW else 128), tl.float32)
    oy = tl.zeros((HEADS, 64), tl.float32)
    oz = tl.zeros((HEADS, 64), tl.float32)
    top = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)

    first = split * blocks_per_split
    last = first + blocks_per_split
    limit0 = _limit(count0, token, columns0)
    for block in range(first, tl.minimum(last, tl.cdiv(limit0, KEYS))):
        ox, oy, oz, top, total = _attend(
            qa, qb, qc, qd, ox, oy, oz, top, total, values0, tail0, codes0, slots0 + token * columns0,
            block * KEYS, limit0, num_slots0, page_bytes0, page_values0, scale, ROWS0, KIND0, KEYS, LOW,
        )  # fmt: skip
    if HAS_SECOND:
        limit1 = _limit(count1, token, columns1)
        before = tl.cdiv(columns0, KEYS)
        end = tl.minimum(last - before, tl.cdiv(limit1, KEYS))
        for block in range(tl.maximum(first - before, 0), end):
            ox, oy, oz, top, total = _attend(
                qa, qb, qc, qd, ox, oy, oz, top, total, values1, tail1, codes1, slots1 + token * columns1,
                block * KEYS, limit1, num_slots1, page_bytes1, page_values1, scale, ROWS1, KIND1, KEYS, LOW,
            )  # fmt: skip

    start_next(USE_PTX)
    place = (split.to(tl.int64) * num_tokens + token) * num_heads + head
    at = acc + place[:, None] * DIM
    mask = (is_head & (total != 0.0))[:, None]  # the merge reads no sums of an empty part
    if LOW:
        tl.store(state + 2 * place, top, mask=is_head)
        tl.store(state + 2 * place + 1, total, mask=is_head)
        tl.store(at + tl.arange(0, 256)[None, :], ox, mask=mask)
    else:
        tl.store(at + 256 + tl.arange(0, 128)[None, :], ox, mask=mask)
        tl.store(at + 384 + tl.arange(0, 64)[None, :], oy, mask=mask)
        tl.store(at + 448 + tl.arange(0, 64)[None, :], oz, mask=mask)


@triton.jit
def _limit(count, token, columns):
    """Columns of this token's slots that may name rows."""
    limit = columns
    if count is not None:
        limit = tl.minimum(tl.maximum(tl.load(count + token), 0), columns).to(tl.int32)
    return limit


@triton.jit
def _attend(
    qa, qb, qc, qd, ox, oy, oz, top, total, values, tail, codes, slots, begin, limit, num_slots, page_bytes,
    page_values, scale, ROWS: tl.constexpr, KIND: tl.constexpr, KEYS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """One block of keys. top, total: [HEADS], running; o*: [HEADS, columns], scaled to `top`."""
    column = begin + tl.arange(0, KEYS)
    slot = tl.load(slots + column, mask=column < limit, other=-1)
    is_row = (slot >= 0) & (slot < num_slots)
    slot = tl.where(is_row, slot, 0).to(tl.int32)  # divided in 32 bits; offsets in bytes need 64
    a = _columns(values, tail, codes, slot, is_row, page_bytes, page_values, 0, 256, ROWS, KIND)
    b = _columns(values, tail, codes, slot, is_row, page_bytes, page_values, 256, 128, ROWS, KIND)
    c = _columns(values, tail, codes, slot, is_row, page_bytes, page_values, 384, 64, ROWS, KIND)
    d = _columns(values, tail, codes, slot, is_row, page_bytes, page_values, 448, 64, ROWS, KIND)
    logits = tl.dot(qa, tl.trans(a))
    logits = tl.dot(qb, tl.trans(b), logits)
    logits = tl.dot(qc, tl.trans(c), logits)
    logits = tl.dot(qd, tl.trans(d), logits)
    logits = tl.where(is_row[None, :], logits * scale, float("-inf"))  # [HEADS, KEYS]
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(logits - new_top[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    narrow = weights.to(tl.bfloat16)
    if LOW:
        ox = tl.dot(narrow, a, ox * shrink[:, None])
    else:
        ox = tl.dot(narrow, b, ox * shrink[:, None])
        oy = tl.dot(narrow, c, oy * shrink[:, None])
        oz = tl.dot(narrow, d, oz * shrink[:, None])
    return ox, oy, oz, new_top, total


@triton.jit
def _columns(
    values, tail, codes, slot, is_row, page_bytes, page_values, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Columns FIRST .. FIRST + WIDTH of the rows in `slot`, as bf16 [KEYS, WIDTH]; zero where `is_row` is not set."""
    page = (slot // ROWS).to(tl.int64)
    in_page = slot % ROWS
    column = tl.arange(0, WIDTH)
    mask = is_row[:, None]
    if KIND == "plain":
        at = page * page_values + in_page * DIM + FIRST
        tile = tl.load(values + at[:, None] + column[None, :], mask=mask, other=0.0)
    elif FIRST >= NOPE:
        at = page * page_values + in_page * (ROW_BYTES // 2) + NOPE // 2
        tile = tl.load(tail + at[:, None] + column[None, :], mask=mask, other=0.0)
    else:
        at = page * page_bytes + in_page * ROW_BYTES + FIRST
        e4m3 = tl.load(values + at[:, None] + column[None, :], mask=mask, other=0.0)
        group = tl.arange(0, WIDTH // GROUP)
        at = page * page_bytes + ROWS * ROW_BYTES + in_page * SCALE_BYTES + FIRST // GROUP
        code = tl.load(codes + at[:, None] + group[None, :], mask=mask, other=127).to(tl.int32)
        factor = (code << 23).to(tl.float32, bitcast=True).to(tl.bfloat16)  # a power of two: the product is exact
        groups = e4m3.to(tl.bfloat16).reshape(slot.shape[0], WIDTH // GROUP, GROUP)
        tile = (groups * factor[:, :, None]).reshape(slot.shape[0], WIDTH)
    return tile


@triton.jit
def combine_kernel(
    acc, state, sink, cis, out, num_splits, num_tokens, num_heads, HEADS: tl.constexpr, USE_PTX: tl.constexpr
):
    """Parts merged in order, the sink added once, the last 64 dims rotated back, rounded once."""
    wait_for_previous(USE_PTX)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    top = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    if sink is not None:
        top = tl.maximum(tl.load(sink + head, mask=is_head, other=0.0) * LOG2_E, LOWEST)
        total += 1.0
    column = tl.arange(0, DIM)
    value = tl.zeros((HEADS, DIM), tl.float32)
    for split in range(num_splits):
        place = (tl.cast(split, tl.int64) * num_tokens + token) * num_heads + head
        part_top = tl.load(state + 2 * place, mask=is_head, other=LOWEST)
        part_total = tl.load(state + 2 * place + 1, mask=is_head, other=0.0)
        # Also reads a part whose sum is NaN: it shows.
        mask = (is_head & (part_total != 0.0))[:, None]
        part = tl.load(acc + place[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, part_top)
        shrink, part_shrink = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        total = total * shrink + part_total * part_shrink
        value = value * shrink[:, None] + part * part_shrink[:, None]
        top = new_top
    value = value / tl.where(total == 0.0, 1.0, total)[:, None]
    if cis is not None:
        pair = tl.arange(0, DIM // 2) - NOPE // 2
        cos = tl.load(cis + token * (DIM - NOPE) + 2 * pair, mask=pair >= 0, other=1.0)[None, :]
        sin = tl.load(cis + token * (DIM - NOPE) + 2 * pair + 1, mask=pair >= 0, other=0.0)[None, :]
        even, odd = tl.split(value.reshape(HEADS, DIM // 2, 2))
        is_turned = (pair >= 0)[None, :]
        turned_even = tl.where(is_turned, even * cos + odd * sin, even)
        turned_odd = tl.where(is_turned, odd * cos - even * sin, odd)
        value = tl.join(turned_even, turned_odd).reshape(HEADS, DIM)
    start_next(USE_PTX)
    at = out + (token * num_heads + head)[:, None] * DIM + column[None, :]
    tl.store(at, value.to(tl.bfloat16), mask=is_head[:, None])
