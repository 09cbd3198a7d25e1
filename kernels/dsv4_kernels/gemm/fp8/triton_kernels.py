"""Kernels of the block-scaled FP8 product.

Few rows: weights are the tensor core's row operand and tokens its columns, so 1 to 64 tokens cost the same stream of
weights. The sum over columns is split into parts that run at once; the last program of a tile to arrive adds them in
order.
Many rows: 128 x 128 tiles in an order that keeps both operands in the L2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl

from dsv4_kernels.triton_pdl import start_next, wait_for_previous

_TILE_COLUMN = tl.constexpr(8)  # token tiles that share their weights' stay in the L2


@triton.jit
def stream_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, partial_ptr, arrivals_ptr, num_tokens, num_columns: tl.constexpr,
    rows_per_group: tl.constexpr, num_groups: tl.constexpr, rows: tl.constexpr, tokens: tl.constexpr,
    parts: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    """`rows` output columns of all tokens, over one part of the sum. partial: [parts, tiles, rows, tokens] fp32."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    num_blocks: tl.constexpr = num_columns // 128
    blocks_per_part: tl.constexpr = (num_blocks + parts - 1) // parts
    first = part * blocks_per_part
    last = tl.minimum(first + blocks_per_part, num_blocks)
    row = tile * rows + tl.arange(0, rows)
    group = tile * rows // rows_per_group
    token = tl.arange(0, tokens)
    source = tl.minimum(token, num_tokens - 1).to(tl.int64)  # columns behind the tokens repeat the last one
    w_ptrs = w_ptr + row[:, None].to(tl.int64) * num_columns + first * 128 + tl.arange(0, 128)[None, :]
    wait_for_previous(use_ptx)
    x_ptrs = x_ptr + (source * num_groups + group)[None, :] * num_columns + first * 128 + tl.arange(0, 128)[:, None]
    x_scale_ptrs = x_scale_ptr + (source * num_groups + group) * num_blocks
    w_scale_ptrs = w_scale_ptr + tile * rows // 128 * num_blocks
    total = tl.zeros((rows, tokens), tl.float32)
    code = tl.load(x_scale_ptrs + first)
    w_scale = tl.load(w_scale_ptrs + first)
    for block in range(first, last):
        product = tl.dot(tl.load(w_ptrs), tl.load(x_ptrs))
        scale = (code.to(tl.int32) << 23).to(tl.float32, bitcast=True) * w_scale
        following = tl.minimum(block + 1, last - 1)  # one block ahead: these small reads are not pipelined
        code = tl.load(x_scale_ptrs + following)
        w_scale = tl.load(w_scale_ptrs + following)
        total += product * scale[None, :]
        w_ptrs += 128
        x_ptrs += 128
    start_next(use_ptx)
    is_last = True
    if parts > 1:
        inside = tl.arange(0, rows)[:, None] * tokens + token[None, :]
        stride = tl.num_programs(0) * rows * tokens
        tl.store(partial_ptr + part * stride + tile * (rows * tokens) + inside, total)
        tl.debug_barrier()  # every thread's part is stored before one thread says so
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == parts - 1
        if is_last:
            tl.store(arrivals_ptr + tile, 0)
            total = tl.zeros((rows, tokens), tl.float32)
            for i in tl.static_range(parts):  # unrolled, so that the reads overlap
                total += tl.load(partial_ptr + i * stride + tile * (rows * tokens) + inside, cache_modifier=".cg")
    if is_last:
        at = token[None, :].to(tl.int64) * (num_groups * rows_per_group) + row[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(token < num_tokens)[None, :])


@triton.jit
def tile_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, num_tokens, num_columns: tl.constexpr,
    rows_per_group: tl.constexpr, num_groups: tl.constexpr, tokens: tl.constexpr, rows: tl.constexpr,
    halves: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    """`tokens` rows and `halves` times `rows` columns of the output; halves take turns with a product's registers."""
    wait_for_previous(use_ptx)
    num_blocks: tl.constexpr = num_columns // 128
    num_row_tiles: tl.constexpr = num_groups * rows_per_group // (rows * halves)
    program = tl.program_id(0)
    num_token_tiles = tl.cdiv(num_tokens, tokens)
    column = program // (_TILE_COLUMN * num_row_tiles)  # of token tiles
    height = tl.minimum(num_token_tiles - column * _TILE_COLUMN, _TILE_COLUMN)
    inside = program % (_TILE_COLUMN * num_row_tiles)
    token_tile = column * _TILE_COLUMN + inside % height
    row_tile = inside // height

    token = token_tile * tokens + tl.arange(0, tokens)
    source = tl.minimum(token, num_tokens - 1).to(tl.int64)
    first_row = row_tile * (rows * halves)
    row = first_row + tl.arange(0, rows)
    group = first_row // rows_per_group
    x_ptrs = x_ptr + (source * num_groups + group)[:, None] * num_columns + tl.arange(0, 128)[None, :]
    w_ptrs = w_ptr + row[None, :].to(tl.int64) * num_columns + tl.arange(0, 128)[:, None]
    x_scale_ptrs = x_scale_ptr + (source * num_groups + group) * num_blocks
    w_scale_ptrs = w_scale_ptr + first_row // 128 * num_blocks
    other_scale_ptrs = w_scale_ptr + (first_row + rows) // 128 * num_blocks
    total = tl.zeros((tokens, rows), tl.float32)
    other = tl.zeros((tokens, rows), tl.float32)
    code = tl.load(x_scale_ptrs)
    w_scale = tl.load(w_scale_ptrs)
    other_scale = tl.load(other_scale_ptrs) if halves == 2 else 0.0
    for block in range(num_blocks):
        x = tl.load(x_ptrs)
        x_scale = (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        total += tl.dot(x, tl.load(w_ptrs)) * (x_scale * w_scale)[:, None]
        following = tl.minimum(block + 1, num_blocks - 1)  # one block ahead: these small reads are not pipelined
        w_scale = tl.load(w_scale_ptrs + following)
        if halves == 2:
            other += tl.dot(x, tl.load(w_ptrs + rows * num_columns)) * (x_scale * other_scale)[:, None]
            other_scale = tl.load(other_scale_ptrs + following)
        code = tl.load(x_scale_ptrs + following)
        x_ptrs += 128
        w_ptrs += 128
    start_next(use_ptx)
    at = token[:, None].to(tl.int64) * (num_groups * rows_per_group) + row[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(token < num_tokens)[:, None])
    if halves == 2:
        tl.store(out_ptr + at + rows, other.to(out_ptr.dtype.element_ty), mask=(token < num_tokens)[:, None])
