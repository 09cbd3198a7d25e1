"""Scores of paged keys on Hopper: pages travel to a ring in shared memory while the tensor core reads earlier ones.

One program is one warpgroup with a ring of its own; several share a multiprocessor, so one's product runs beside
another's sums. The pages of all tokens are dealt evenly to the programs, which stay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dsv4_kernels.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4_kernels.indexer.gluon_fp4 import CODES, WORDS, fp4_products, value_at
from dsv4_kernels.indexer.triton_select import GROUP, LOWEST
from dsv4_kernels.quant.triton_codec import fp8_group_code, power_of_two, to_e4m3

ROWS = gl.constexpr(64)  # keys of a page, and of one product
DIM = gl.constexpr(128)  # values of a key


@jit(do_not_specialize=["num_tokens"])
def scan_kernel(
    keys, scales, q, weights, page_table, seqs, num_visible, scores, maxima, num_tokens, columns, width, stride, topk,
    H: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """keys: descriptor of the pool as rows of keys, [..., 128] e4m3 or [..., 16] int32 words of e2m1.

    scales: of the pool as words, fp32 scales of FP8 keys or int32 words of the four UE8M0 bytes of FP4 keys.

    scores, maxima: as `triton_select` reads them. TOKENS: a power of two, at least num_tokens.
    """
    one: gl.constexpr = gl.BlockedLayout([TOKENS // 128 if TOKENS > 128 else 1], [32], [4], [0])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    is_fp4: gl.constexpr = keys.dtype == gl.int32
    ring = gl.allocate_shared_memory(keys.dtype, [STAGES, ROWS, 16 if is_fp4 else DIM], keys.layout)
    factors = gl.allocate_shared_memory(scales.dtype, [STAGES, ROWS], scales.layout)
    query = gl.allocate_shared_memory(gl.float8e4nv, [HEADS, DIM], gl.NVMMASharedLayout(128, 8, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()

    number = gl.arange(0, TOKENS, layout=one)
    visible = gl.minimum(gl.load(num_visible + number, mask=number < num_tokens, other=0).to(gl.int32), width)
    num_pages = gl.where(visible > topk, (visible + ROWS - 1) // ROWS, 0)
    ends = gl.associative_scan(num_pages, 0, _add)
    total = gl.sum(num_pages, axis=0)
    share = total // gl.num_programs(0)
    rest = total % gl.num_programs(0)
    at = gl.program_id(0) * share + gl.minimum(gl.program_id(0), rest)
    end = at + share + (gl.program_id(0) < rest).to(gl.int32)
    issued = 0  # pages so far, for ring places and phases
    while at < end:
        token = gl.sum((ends <= at).to(gl.int32), axis=0)
        token_end = gl.sum(gl.where(number == token, ends, 0), axis=0)
        first = at - token_end + gl.sum(gl.where(number == token, num_pages, 0), axis=0)
        seen = gl.sum(gl.where(number == token, visible, 0), axis=0)
        count = gl.minimum(end, token_end) - at
        pages = page_table + gl.load(seqs + token).to(gl.int64) * columns + first
        for stage in gl.static_range(STAGES):
            page = gl.load(pages + stage, mask=stage < count, other=0)
            _fetch(keys, scales, page, ring, factors, full, (issued + stage) % STAGES, stage < count)
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, wide))
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
        if is_fp4:
            column = value_at(column)
        at_q = q + token.to(gl.int64) * (H * DIM) + head[:, None] * DIM + column[None, :]
        values = gl.load(at_q, mask=(head < H)[:, None] & (column < DIM)[None, :], other=0.0).to(gl.float32)
        code = fp8_group_code(gl.max(gl.abs(values), axis=1))  # rounded already: this loses nothing
        query.store(to_e4m3(values, code[:, None]))
        weight = gl.load(weights + token.to(gl.int64) * H + head, mask=head < H, other=0.0) * power_of_two(code - 127)
        weight = gl.convert_layout(weight, gl.SliceLayout(0, sums))
        fence_async_shared()
        gl.thread_barrier()
        row = scores + token.to(gl.int64) * width
        row_maxima = maxima + token.to(gl.int64) * stride
        page = gl.load(pages + STAGES, mask=count > STAGES, other=0)
        for i in range(count):
            place = (issued + i) % STAGES
            following = gl.load(pages + i + STAGES + 1, mask=i + STAGES + 1 < count, other=0)
            mbarrier.wait(full.index(place), ((issued + i) // STAGES) & 1)
            if is_fp4:
                words = ring.index(place).load(WORDS)
                products, factor = fp4_products(words, factors.index(place).load(CODES), query, HEADS, sums)
            else:
                products = gl.zeros([ROWS, HEADS], gl.float32, layout=sums)
                products = warpgroup_mma(
                    ring.index(place), query.permute((1, 0)), products, use_acc=False, is_async=True
                )
                factor = factors.index(place).load(rows)
                products = warpgroup_mma_wait(0, deps=[products])
            gl.thread_barrier()
            _fetch(keys, scales, page, ring, factors, full, place, i + STAGES < count)
            page = following
            score = gl.sum(gl.maximum(products, 0.0) * weight[None, :], axis=1) * factor
            _store(row, row_maxima, (first + i) * ROWS, seen, score, rows)
        gl.thread_barrier()
        issued += count
        at += count


@jit
def _add(a, b):
    return a + b


@jit
def _fetch(keys, scales, page, ring, factors, full, place, is_page):
    """Start the copy of one page's keys and scales to their place in the ring."""
    words: gl.constexpr = keys.block_type.nbytes // (4 * ROWS)  # of a key without its scale
    ready = full.index(place)
    mbarrier.expect(ready, ROWS * (words + 1) * 4, pred=is_page)
    at_keys = page.to(gl.int32) * (ROWS + ROWS // words)
    tma.async_copy_global_to_shared(keys, [at_keys, 0], ready, ring.index(place), pred=is_page)
    at_scales = page.to(gl.int32) * (ROWS * (words + 1)) + ROWS * words
    tma.async_copy_global_to_shared(scales, [at_scales], ready, factors.index(place), pred=is_page)


@jit
def _store(row, row_maxima, first, visible, score, rows: gl.constexpr):
    """As `triton_scan._store`."""
    entry = first + gl.arange(0, ROWS, layout=rows)
    bits = (score + 0.0).to(gl.int32, bitcast=True)
    ordered = gl.where(entry < visible, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
    gl.store(row + entry, ordered, mask=entry < visible)
    largest = gl.max(gl.reshape(ordered, [ROWS // GROUP, GROUP]), axis=1)
    group = first // GROUP + gl.arange(0, ROWS // GROUP, layout=largest.type.layout)
    gl.store(row_maxima + group, largest, mask=group * GROUP < visible)
