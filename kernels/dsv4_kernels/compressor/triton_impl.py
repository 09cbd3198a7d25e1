"""A compressor's step in Triton: one program per token and compressor, in one launch.

It stores its token's state row and, when the token completes a block, pools the block, normalises, rotates, rounds
and stores the entry. Tokens of earlier steps are read from the state ring, those of this step from the projection. A
step longer than the ring's headroom would overwrite rows that its own entries still need: it takes two launches,
entries first, and a program takes several tokens, because most have nothing to store in either. Blocks are pooled in
chunks of rows with a running maximum, in an order that depends on positions within the block only.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dsv4_kernels.compressor import reference
from dsv4_kernels.compressor.step import CompressorBatch, CompressorPart, num_sets
from dsv4_kernels.kv.triton_rows import hadamard_row, norm_row, pool_views, rotate_row, store_row

_CHUNK_ROWS = 16  # tokens in registers at once
_NUM_WARPS = 8
_STATE_GROUP = 4  # tokens of one program that only stores state, which few tokens of a long step need

pool_entries = reference.pool_entries  # a step on the GPU is `compress`


def compress(parts: Sequence[CompressorPart], batch: CompressorBatch, ratio: int, eps: float) -> None:
    num_tokens = batch.positions.shape[0]
    if num_tokens == 0:
        return
    headroom = min(part.state.rows_per_page for part in parts) - num_sets(ratio) * ratio
    cis = torch.view_as_real(batch.cis).contiguous()
    shared = (
        num_tokens, batch.positions, batch.token_to_seq, batch.cu_seqlens_q, batch.state_slots,
        batch.page_table.contiguous(), batch.page_table.shape[1], cis, eps,
    )  # fmt: skip
    first, second = _pointers(parts[0]), _pointers(parts[-1])
    launches = [(True, True, 1)]
    if batch.max_seqlen_q > headroom + 1:
        launches = [(True, False, ratio), (False, True, _STATE_GROUP)]
    for entries, state, group in launches:
        _compress_kernel[(triton.cdiv(num_tokens, group), len(parts))](
            *shared, *first, *second, *_sizes(parts[0]), *_sizes(parts[-1]), RATIO=ratio, SETS=num_sets(ratio),
            PAIRS=batch.cis.shape[1], CHUNK=min(_CHUNK_ROWS, num_sets(ratio) * ratio), ENTRIES=entries, STATE=state,
            GROUP=group, num_warps=_NUM_WARPS,
        )  # fmt: skip


def _pointers(part: CompressorPart) -> tuple[torch.Tensor | int, ...]:
    assert part.kv.stride(1) == part.gate.stride(1) == 1, (part.kv.stride(), part.gate.stride())
    state = part.state.pages.view(torch.float32)
    return (
        part.kv, part.gate, part.kv.stride(0), part.gate.stride(0), part.ape, part.norm_weight, state,
        *pool_views(part.entries),
    )  # fmt: skip


def _sizes(part: CompressorPart) -> tuple[int | str | bool, ...]:
    """Constants: dim, padded dim, ring rows, rows of an entry page, rotary dims and kind of the format, rounding."""
    fmt, dim = part.entries.format, part.norm_weight.shape[0]
    is_bf16 = fmt.dtype == torch.bfloat16
    ring, per_page = part.state.rows_per_page, part.entries.rows_per_page
    return dim, triton.next_power_of_2(dim), ring, per_page, fmt.rope_dim, fmt.kind, is_bf16, part.is_rotated


@triton.jit
def _compress_kernel(
    num_tokens, positions, token_to_seq, cu_seqlens_q, state_slots, page_table, num_columns, cis, eps,
    kv_a, gate_a, kv_stride_a, gate_stride_a, ape_a, weight_a, state_a, values_a, tail_a, codes_a, num_slots_a, bytes_a,
    kv_b, gate_b, kv_stride_b, gate_stride_b, ape_b, weight_b, state_b, values_b, tail_b, codes_b, num_slots_b, bytes_b,
    D_A: tl.constexpr, BLOCK_A: tl.constexpr, RING_A: tl.constexpr, ROWS_A: tl.constexpr, ROPE_A: tl.constexpr,
    KIND_A: tl.constexpr, IS_BF16_A: tl.constexpr, ROTATED_A: tl.constexpr,
    D_B: tl.constexpr, BLOCK_B: tl.constexpr, RING_B: tl.constexpr, ROWS_B: tl.constexpr, ROPE_B: tl.constexpr,
    KIND_B: tl.constexpr, IS_BF16_B: tl.constexpr, ROTATED_B: tl.constexpr,
    RATIO: tl.constexpr, SETS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, ENTRIES: tl.constexpr,
    STATE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP tokens a program; those that have something to store follow one another."""
    rows = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    position_of = tl.load(positions + rows, mask=rows < num_tokens, other=-1)
    is_due = position_of >= 0
    if not STATE:
        is_due = is_due & ((position_of + 1) % RATIO == 0)
    if not ENTRIES:
        end = tl.load(cu_seqlens_q + tl.load(token_to_seq + rows, mask=is_due, other=0) + 1)
        is_due = is_due & (end - rows <= tl.maximum(RING_A, RING_B))
    due = tl.where(is_due, rows, num_tokens)
    # Addresses of the body in registers across the loop would halve the programs that a multiprocessor holds.
    for _ in tl.range(tl.sum(is_due.to(tl.int32), axis=0), disable_licm=True):
        row = tl.min(due, axis=0)
        token = row.to(tl.int64)
        position = tl.load(positions + token).to(tl.int64)
        seq = tl.load(token_to_seq + token)
        start = position - (token - tl.load(cu_seqlens_q + seq))  # first position of this step
        behind = tl.load(cu_seqlens_q + seq + 1) - token
        ring = tl.load(state_slots + seq).to(tl.int64)
        table = page_table + seq * num_columns
        if tl.program_id(1) == 0:
            if STATE:
                _store_state(token, position, ring, behind, kv_a, gate_a, kv_stride_a, gate_stride_a, ape_a, state_a,
                             SETS * D_A, SETS * BLOCK_A, RATIO, RING_A)  # fmt: skip
            if ENTRIES and (position + 1) % RATIO == 0:
                _store_entry(token, position, start, ring, table, num_columns, cis, eps, kv_a, gate_a, kv_stride_a,
                             gate_stride_a, ape_a, weight_a, state_a, values_a, tail_a, codes_a, num_slots_a, bytes_a,
                             D_A, BLOCK_A, RING_A, ROWS_A, ROPE_A, KIND_A, IS_BF16_A, ROTATED_A, RATIO, SETS, PAIRS,
                             CHUNK)  # fmt: skip
        else:
            if STATE:
                _store_state(token, position, ring, behind, kv_b, gate_b, kv_stride_b, gate_stride_b, ape_b, state_b,
                             SETS * D_B, SETS * BLOCK_B, RATIO, RING_B)  # fmt: skip
            if ENTRIES and (position + 1) % RATIO == 0:
                _store_entry(token, position, start, ring, table, num_columns, cis, eps, kv_b, gate_b, kv_stride_b,
                             gate_stride_b, ape_b, weight_b, state_b, values_b, tail_b, codes_b, num_slots_b, bytes_b,
                             D_B, BLOCK_B, RING_B, ROWS_B, ROPE_B, KIND_B, IS_BF16_B, ROTATED_B, RATIO, SETS, PAIRS,
                             CHUNK)  # fmt: skip
        due = tl.where(rows == row, num_tokens, due)


@triton.jit
def _store_state(
    token, position, ring, behind, kv, gate, kv_stride, gate_stride, ape, state,
    C: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The token's raw row; only the last RING tokens of a step leave one."""
    channel = tl.arange(0, BLOCK)
    mask = (channel < C) & (behind <= RING)
    row = state + (ring * RING + position % RING) * (2 * C) + channel
    biased = tl.load(gate + token * gate_stride + channel, mask=mask, other=0.0)
    biased += tl.load(ape + (position % RATIO) * C + channel, mask=mask, other=0.0)
    tl.store(row, tl.load(kv + token * kv_stride + channel, mask=mask, other=0.0), mask=mask)
    tl.store(row + C, biased, mask=mask)


@triton.jit
def _store_entry(
    token, position, start, ring, table, num_columns, cis, eps, kv, gate, kv_stride, gate_stride, ape, weight, state,
    values, tail, codes, num_slots, page_bytes,
    D: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr, ROPE: tl.constexpr,
    KIND: tl.constexpr, IS_BF16: tl.constexpr, ROTATED: tl.constexpr, RATIO: tl.constexpr, SETS: tl.constexpr,
    PAIRS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = SETS * D
    channel = tl.arange(0, BLOCK)[None, :]
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    pooled = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SETS * RATIO, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        wanted = position - (SETS * RATIO - 1) + slot  # [CHUNK] positions
        is_fresh = ((wanted >= start) & (wanted >= 0))[:, None] & (channel < D)
        is_stored = ((wanted < start) & (wanted >= 0))[:, None] & (channel < D)
        # The earlier block gives its first channels, the block itself its last.
        column = channel + (slot // RATIO * D)[:, None]
        row = (token - (position - wanted))[:, None]
        new_value = tl.load(kv + row * kv_stride + column, mask=is_fresh, other=0.0)
        new_gate = tl.load(gate + row * gate_stride + column, mask=is_fresh, other=0.0)
        new_gate += tl.load(ape + (wanted % RATIO)[:, None] * C + column, mask=is_fresh, other=0.0)
        stored = state + (ring * RING + wanted % RING)[:, None] * (2 * C) + column
        value = tl.where(is_fresh, new_value, tl.load(stored, mask=is_stored, other=0.0))
        logit = tl.where(is_fresh, new_gate, tl.load(stored + C, mask=is_stored, other=float("-inf")))
        higher = tl.maximum(most, tl.max(logit, axis=0))
        higher = tl.where(channel.reshape(BLOCK) < D, higher, 0.0)  # padded channels stay numbers
        weights = tl.exp(logit - higher[None, :])
        rescale = tl.exp(most - higher)
        total = total * rescale + tl.sum(weights, axis=0)
        pooled = pooled * rescale + tl.sum(weights * value, axis=0)
        most = higher
    row = _round(tl.where(total > 0, pooled / total, 0.0), IS_BF16)
    row = _round(norm_row(row, weight, eps, D, BLOCK, True), IS_BF16)
    row = _round(rotate_row(row, cis + token * (2 * PAIRS), 1.0, D, BLOCK, PAIRS), IS_BF16)
    if ROTATED:
        row = _round(hadamard_row(row, BLOCK), IS_BF16)
    entry = position // RATIO
    page = tl.load(table + entry // ROWS, mask=entry // ROWS < num_columns, other=-1).to(tl.int64)
    to = tl.where(page >= 0, page * ROWS + entry % ROWS, -1)
    store_row(row, to, values, tail, codes, num_slots, page_bytes, ROWS, D, BLOCK, ROPE, KIND)


@triton.jit
def _round(row, IS_BF16: tl.constexpr):
    if IS_BF16:
        row = row.to(tl.bfloat16).to(tl.float32)
    return row
