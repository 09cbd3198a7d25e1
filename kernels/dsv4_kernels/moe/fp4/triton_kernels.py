"""Kernels of the MXFP4 experts: gate-up product with SwiGLU and requantisation, down product, sum over slots.

Weights are the tensor core's row operand and tokens its columns, so that one to six tokens of an expert do not waste a
128-row tile. Every product is summed in 128-column blocks that are added in order in fp32: the bits of a row depend
neither on the tile it is in nor on the size of the batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl

from dsv4_kernels.moe.fp4.triton_unpack import unpack_group, unpack_tile
from dsv4_kernels.quant.triton_codec import fp8_group_code, to_e4m3
from dsv4_kernels.triton_pdl import start_next, wait_for_previous


@triton.jit
def gather_kernel(
    x_ptr, x_scale_ptr, pairs_ptr, tile_expert_ptr, tile_first_ptr, tile_rows_ptr, rows_ptr, scale_tiles_ptr, topk,
    num_columns: tl.constexpr, tokens: tl.constexpr, blocks: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    """Rows in the order of the work list, `blocks` blocks of 128 columns per program; quantised unless they are.

    x: [T, D] float, or e4m3 with x_scale [T, D/128]. rows: [P, D] e4m3. scale_tiles: [max_tiles, D/128, tokens] int32.
    """
    wait_for_previous(use_ptx)
    item = tl.program_id(0)
    if tl.load(tile_expert_ptr + item) >= 0:
        first = tl.load(tile_first_ptr + item)
        num_rows = tl.load(tile_rows_ptr + item)
        column = tl.arange(0, tokens)
        token = (tl.load(pairs_ptr + first + tl.minimum(column, num_rows - 1)) // topk).to(tl.int64)
        row = (first + column).to(tl.int64)
        is_row = column < num_rows
        num_blocks: tl.constexpr = num_columns // 128
        for i in tl.static_range(blocks):
            block = tl.program_id(1) * blocks + i
            at = block * 128 + tl.arange(0, 128)
            if block < num_blocks:
                values = tl.load(x_ptr + token[:, None] * num_columns + at[None, :])
                if x_scale_ptr is None:
                    values, code = quantise(values.to(tl.float32), 1)
                else:
                    code = tl.load(x_scale_ptr + token * num_blocks + block).to(tl.int32)
                tl.store(rows_ptr + row[:, None] * num_columns + at[None, :], values, mask=is_row[:, None])
                tl.store(scale_tiles_ptr + (item * num_blocks + block).to(tl.int64) * tokens + column, code << 23)


@triton.jit
def gate_up_kernel(
    rows_ptr, scale_tiles_ptr, words_ptr, exponents_ptr, block_exponent_ptr, pairs_ptr, tile_expert_ptr,
    tile_first_ptr, tile_rows_ptr, weights_ptr, hidden_ptr, hidden_scale_tiles_ptr, limit, num_columns: tl.constexpr,
    num_tiles: tl.constexpr, tokens: tl.constexpr, is_folded: tl.constexpr, is_split: tl.constexpr,
    use_ptx: tl.constexpr,
):  # fmt: skip
    """One tile of 128 intermediate columns for one tile of the work list.

    hidden: [P, I] e4m3 in the order of the work list. hidden_scale_tiles: [max_tiles, I/128, tokens] int32.
    """
    tile = tl.program_id(0)
    item = tl.program_id(1)
    wait_for_previous(use_ptx)
    expert = tl.load(tile_expert_ptr + item)
    if expert >= 0:
        first = tl.load(tile_first_ptr + item)
        num_rows = tl.load(tile_rows_ptr + item)
        weight_tile = expert.to(tl.int64) * num_tiles + tile
        gate, up = _product(
            rows_ptr, scale_tiles_ptr, first, item, words_ptr, exponents_ptr, block_exponent_ptr, weight_tile,
            num_columns, 2, True, tokens, is_folded, is_split, use_ptx,
        )  # fmt: skip
        start_next(use_ptx)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        column = tl.arange(0, tokens)
        is_row = column < num_rows
        pair = tl.load(pairs_ptr + first + column, mask=is_row, other=0)
        weight = tl.load(weights_ptr + pair)
        values, code = quantise(gate / (1.0 + tl.exp(-gate)) * up * weight[None, :], 0)
        at = (first + column).to(tl.int64)[None, :] * (num_tiles * 128) + tile * 128 + tl.arange(0, 128)[:, None]
        tl.store(hidden_ptr + at, values, mask=is_row[None, :])
        tl.store(hidden_scale_tiles_ptr + (item * num_tiles + tile).to(tl.int64) * tokens + column, code << 23)


@triton.jit
def down_kernel(
    hidden_ptr, hidden_scale_tiles_ptr, words_ptr, exponents_ptr, block_exponent_ptr, pairs_ptr, tile_expert_ptr,
    tile_first_ptr, tile_rows_ptr, out_ptr, num_columns: tl.constexpr, num_tiles: tl.constexpr, tokens: tl.constexpr,
    halves: tl.constexpr, is_folded: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    """`halves` tiles of 128 output columns for one tile of the work list. out: [P, D] bf16, in the pairs' order."""
    tile = tl.program_id(0) * halves
    item = tl.program_id(1)
    wait_for_previous(use_ptx)
    expert = tl.load(tile_expert_ptr + item)
    if expert >= 0:
        first = tl.load(tile_first_ptr + item)
        num_rows = tl.load(tile_rows_ptr + item)
        weight_tile = expert.to(tl.int64) * num_tiles + tile
        product, other = _product(
            hidden_ptr, hidden_scale_tiles_ptr, first, item, words_ptr, exponents_ptr, block_exponent_ptr, weight_tile,
            num_columns, halves, False, tokens, is_folded, False, use_ptx,
        )  # fmt: skip
        start_next(use_ptx)
        column = tl.arange(0, tokens)
        is_row = column < num_rows
        pair = tl.load(pairs_ptr + first + column, mask=is_row, other=0).to(tl.int64)
        at = pair[None, :] * (num_tiles * 128) + tile * 128 + tl.arange(0, 128)[:, None]
        tl.store(out_ptr + at, product.to(tl.bfloat16), mask=is_row[None, :])
        if halves == 2:
            tl.store(out_ptr + at + 128, other.to(tl.bfloat16), mask=is_row[None, :])


@triton.jit
def sum_slots_kernel(
    rows_ptr, ids_ptr, shared_ptr, out_ptr, first_expert, num_experts, topk: tl.constexpr, dim: tl.constexpr,
    block: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    """out[t] = shared[t] + sum over the slots of t whose expert is here, in order. rows: [T * topk, D] bf16."""
    wait_for_previous(use_ptx)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < dim
    total = tl.zeros((block,), tl.float32)
    if shared_ptr is not None:
        total += tl.load(shared_ptr + token * dim + column, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(topk):
        local = tl.load(ids_ptr + token * topk + slot) - first_expert
        is_here = (local >= 0) & (local < num_experts)
        row = tl.load(rows_ptr + (token * topk + slot) * dim + column, mask=inside & is_here, other=0.0)
        total += row.to(tl.float32)
    tl.store(out_ptr + token * dim + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantise(x, axis: tl.constexpr):
    """E4M3 with one power-of-two scale along `axis`, as quant/reference.py. Returns: values; UE8M0 codes as int32."""
    code = fp8_group_code(tl.max(tl.abs(x), axis))
    return to_e4m3(x, tl.expand_dims(code, axis)), code


@triton.jit
def _product(
    rows_ptr, scale_tiles_ptr, first, item, words_ptr, exponents_ptr, block_exponent_ptr, weight_tile,
    num_columns: tl.constexpr, halves: tl.constexpr, is_one_tile: tl.constexpr, tokens: tl.constexpr,
    is_folded: tl.constexpr, is_split: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    """128 or 2 x 128 weight rows, one tile or two in a row, times the activations first, first + 1, ...

    Columns behind the work item's rows hold other or undefined rows: a column never enters another. The halves share
    the activations and take turns with the registers of a product; split products of 64 rows need half of them, and
    words addressed from one pointer leave none to be spilled. Returns: two blocks [128, tokens] fp32.
    """
    num_blocks: tl.constexpr = num_columns // 128
    tile_rows: tl.constexpr = 128 * halves if is_one_tile else 128
    other_row: tl.constexpr = 64 if is_one_tile else num_blocks * 128  # from a row to the one of the other half
    column = tl.arange(0, tokens)
    weight_row = tl.arange(0, 64)[:, None] + tl.arange(0, 2)[None, :] * (tile_rows // 2)  # packed order
    block = weight_tile * num_blocks
    row_ptr = rows_ptr + first.to(tl.int64) * num_columns
    scale_ptr = scale_tiles_ptr + item.to(tl.int64) * (num_blocks * tokens)
    word_ptr = words_ptr + block * (tile_rows * 16)
    exponent_ptr = exponents_ptr + block * tile_rows
    if is_folded:
        part_rows: tl.constexpr = 64 if is_split else 128
        part_row = tl.arange(0, part_rows // 2)[:, None] + tl.arange(0, 2)[None, :] * (tile_rows // 2)
        x_ptrs = row_ptr + column[None, :] * num_columns + tl.arange(0, 128)[:, None]
        word_at = part_row[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        exponent_ptrs = exponent_ptr + part_row
        scale_ptrs = scale_ptr + column
        scale = tl.load(scale_ptrs) + tl.load(block_exponent_ptr + block)
        total = tl.zeros((part_rows, tokens), tl.float32)
        other = tl.zeros((part_rows, tokens), tl.float32)
        lower = tl.zeros((part_rows, tokens), tl.float32)
        other_lower = tl.zeros((part_rows, tokens), tl.float32)
        for k in range(num_blocks):
            x = tl.load(x_ptrs)
            factor = scale.to(tl.float32, bitcast=True)[None, :]
            weights = unpack_tile(tl.load(word_ptr + word_at), tl.load(exponent_ptrs), part_rows, use_ptx)
            total += tl.dot(weights, x) * factor
            if is_split:
                weights = unpack_tile(
                    tl.load(word_ptr + 32 * 16 + word_at), tl.load(exponent_ptrs + 32), part_rows, use_ptx
                )
                lower += tl.dot(weights, x) * factor
            if halves == 2:
                if not is_one_tile:
                    shift = tl.load(block_exponent_ptr + block + k + num_blocks) - tl.load(
                        block_exponent_ptr + block + k
                    )
                    factor = (scale + shift).to(tl.float32, bitcast=True)[None, :]
                weights = unpack_tile(
                    tl.load(word_ptr + other_row * 16 + word_at), tl.load(exponent_ptrs + other_row), part_rows, use_ptx
                )
                other += tl.dot(weights, x) * factor
                if is_split:
                    weights = unpack_tile(
                        tl.load(word_ptr + (other_row + 32) * 16 + word_at), tl.load(exponent_ptrs + (other_row + 32)),
                        part_rows, use_ptx,
                    )  # fmt: skip
                    other_lower += tl.dot(weights, x) * factor
            following = tl.minimum(k + 1, num_blocks - 1)  # one block ahead: these small reads are not pipelined
            scale = tl.load(scale_ptrs + following * tokens) + tl.load(block_exponent_ptr + block + following)
            x_ptrs += 128
            word_ptr += tile_rows * 16
            exponent_ptrs += tile_rows
        if is_split:
            total = _below(total, lower)
            other = _below(other, other_lower)
    else:
        total = tl.zeros((128, tokens), tl.float32)
        other = tl.zeros((128, tokens), tl.float32)
        group_words = word_ptr + weight_row[:, :, None] * 16 + 4 * tl.arange(0, 4)[None, None, :]
        group_x = row_ptr + column[None, :] * num_columns + tl.arange(0, 32)[:, None]
        for k in range(num_blocks * 4):
            x = tl.load(group_x + k * 32)
            scale = tl.load(scale_ptr + column + k // 4 * tokens).to(tl.float32, bitcast=True)
            words = group_words + k // 4 * (tile_rows * 16) + k % 4
            codes = exponent_ptr + k // 4 * tile_rows
            total += _group_product(words, codes, x, k % 4, tile_rows // 2, use_ptx) * scale[None, :]
            if halves == 2:
                words += other_row * 16
                codes += other_row
                other += _group_product(words, codes, x, k % 4, tile_rows // 2, use_ptx) * scale[None, :]
    return total, other


@triton.jit
def _below(upper, lower):
    """[rows, tokens] twice -> [2 * rows, tokens]."""
    return tl.join(upper, lower).permute(2, 0, 1).reshape(2 * upper.shape[0], upper.shape[1])


@triton.jit
def _group_product(words, codes, x, group, second_row, use_ptx: tl.constexpr):
    """128 rows of one group of 32 columns times x, each times the row's scale; `second_row`: position of row 8."""
    row = tl.arange(0, 128)
    in_order = row // 8 % 2 * second_row + row // 16 * 8 + row % 8
    code = (tl.load(codes + in_order) >> (8 * group)) & 0xFF
    exponent = tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    return tl.dot(unpack_group(tl.load(words), 128, use_ptx), x) * exponent[:, None]
