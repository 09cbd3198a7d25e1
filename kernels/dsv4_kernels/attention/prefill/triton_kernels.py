"""Kernel of prefill attention: one program per token and 64 heads, from its first key to its rounded result."""

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
def prefill_kernel(
    q, window, window_begin, window_end, num_window, values, slots, count, columns, slot_stride,
    num_slots, page_units, sink, cis, out, codes, num_heads, scale,
    ROWS: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, head blocks). Rows of the window, then rows of the pool if there is one (KIND is not None)."""
    wait_for_previous(USE_PTX)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    queries = load_queries(q, token, head, num_heads)
    o = tl.zeros((HEADS, DIM), tl.float32)
    top = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    if KIND is not None:
        limit = column_limit(count, token, columns)
        slots += token * slot_stride
        for first in range(0, limit, KEYS):
            slot, is_row = named_rows(slots, first, limit, num_slots, KEYS)
            page = slot // ROWS
            keys = pool_rows(
                values, slot, page, slot - page * ROWS, is_row, ROWS, page_units, KIND
            )  # fmt: skip
            o, top, total = attend(queries, o, top, total, keys, is_row, scale, first < limit)
    begin = tl.maximum(tl.load(window_begin + token), 0).to(tl.int32)
    end = tl.minimum(tl.load(window_end + token), num_window).to(tl.int32)
    column = tl.arange(0, DIM)[None, :]
    for first in tl.range(begin, end, KEYS, num_stages=2):  # of rows; the launch counts a stage of slots as well
        row = first + tl.arange(0, KEYS)
        is_row = row < end
        keys = tl.load(window + row.to(tl.int64)[:, None] * DIM + column, mask=is_row[:, None], other=0.0)
        o, top, total = attend(queries, o, top, total, keys, is_row, scale, first < end)
    start_next(USE_PTX)
    value = with_sink(o, top, total, sink, head, num_heads)
    if cis is not None:
        value = rotate_back(value, cis, token, HEADS)
    store_result(value, out, codes, token, head, num_heads, HEADS)
