"""Kernels of decode attention: parts of the keys per program, then a merge."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from dsv4_kernels.attention.triton_core import (
    DIM,
    LOWEST,
    attend,
    column_limit,
    load_queries,
    named_rows,
    pool_rows,
    rotate_back,
    store_result,
    with_sink,
)
from dsv4_kernels.triton_pdl import start_next, wait_for_previous


@triton.jit
def attend_kernel(
    q, values0, slots0, count0, columns0, num_slots0, page_units0,
    values1, slots1, count1, columns1, num_slots1, page_units1,
    acc, state, sink, cis, out, codes, blocks_per_split, num_tokens, num_heads, scale,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one token; without `acc` there is one part, and the program ends the query itself.

    Grid: (splits, tokens, head blocks). A part leaves its sums [HEADS, 512], largest logit and sum of numerators.
    """
    wait_for_previous(USE_PTX)
    split = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    queries = load_queries(q, token, head, num_heads)
    o = tl.zeros((HEADS, DIM), tl.float32)
    top = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    limit0 = column_limit(count0, token, columns0)
    limit1 = column_limit(count1, token, columns1)
    before = tl.cdiv(limit0, KEYS)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, before + tl.cdiv(limit1, KEYS))
    slots0 += token * columns0
    slots1 += token * columns1
    # One loop for both pools: rows of the next block arrive across the border as well, and two loops spill.
    for block in range(first, last):
        is_first = block < before
        begin = tl.where(is_first, block, block - before) * KEYS
        slot, is_row = named_rows(
            tl.where(is_first, slots0, slots1), begin, tl.where(is_first, limit0, limit1),
            tl.where(is_first, num_slots0, num_slots1), KEYS,
        )  # fmt: skip
        page = tl.where(is_first, slot // ROWS0, slot // ROWS1)
        rows = tl.where(is_first, ROWS0, ROWS1)
        keys = pool_rows(
            tl.where(is_first, values0, values1), slot, page, slot - page * rows, is_row, rows,
            tl.where(is_first, page_units0, page_units1), KIND,
        )  # fmt: skip
        o, top, total = attend(queries, o, top, total, keys, is_row, scale, block < last)
    start_next(USE_PTX)
    if acc is None:
        value = with_sink(o, top, total, sink, head, num_heads)
        if cis is not None:
            value = rotate_back(value, cis, token, HEADS)
        store_result(value, out, codes, token, head, num_heads, HEADS)
    else:
        is_head = head < num_heads
        place = (split.to(tl.int64) * num_tokens + token) * num_heads
        tl.store(state + 2 * place + 2 * head, top, mask=is_head)
        tl.store(state + 2 * place + 2 * head + 1, total, mask=is_head)
        mask = (is_head & (first < last))[:, None]  # the merge reads no sums of an empty part
        tl.store(acc + place * DIM + head[:, None] * DIM + tl.arange(0, DIM)[None, :], o, mask=mask)


@triton.jit
def combine_kernel(
    acc, state, sink, cis, out, codes, num_splits, num_tokens, num_heads, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Parts of one token and head merged in order, the sink added once, the last 64 dims rotated back, rounded once.

    SPLITS: a power of two of at least num_splits. Parts are read UNROLL at a time.
    """
    wait_for_previous(USE_PTX)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) + tl.arange(0, 1)
    split = tl.arange(0, SPLITS)
    at = state + 2 * ((split.to(tl.int64) * num_tokens + token) * num_heads + tl.program_id(1))
    tops = tl.load(at, mask=split < num_splits, other=LOWEST)
    totals = tl.load(at + 1, mask=split < num_splits, other=0.0)
    top = tl.max(tops, axis=0)
    total = tl.sum(totals * tl.exp2(tops - top), axis=0)
    column = tl.arange(0, DIM)[None, :]
    value = tl.zeros((1, DIM), tl.float32)
    for part in tl.range(0, num_splits, loop_unroll_factor=UNROLL):
        place = (tl.cast(part, tl.int64) * num_tokens + token) * num_heads + head
        part_top = tl.load(state + 2 * place)
        # Also reads a part whose sum is NaN: it shows.
        mask = (tl.load(state + 2 * place + 1) != 0.0)[:, None]
        sums = tl.load(acc + place[:, None] * DIM + column, mask=mask, other=0.0)
        value += sums * tl.exp2(part_top - top)[:, None]
    value = with_sink(
        value, tl.zeros((1,), tl.float32) + top, tl.zeros((1,), tl.float32) + total, sink, head, num_heads
    )
    if cis is not None:
        value = rotate_back(value, cis, token, 1)
    start_next(USE_PTX)
    store_result(value, out, codes, token, head, num_heads, 1)
