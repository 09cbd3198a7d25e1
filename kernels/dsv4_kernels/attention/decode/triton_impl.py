"""Decode attention in Triton: one launch where tokens fill the GPU, else parts of the keys and a merge."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from collections.abc import Sequence

import torch
import triton

from dsv4_kernels.attention.decode.triton_kernels import attend_kernel, combine_kernel
from dsv4_kernels.attention.keys import Ending, PoolKeys
from dsv4_kernels.attention.triton_core import DEFAULT_STEP, ROW_BYTES, Step, empty_fp8, turns_of
from dsv4_kernels.kv.triton_rows import pool_views
from dsv4_kernels.triton_pdl import uses_ptx

_HEADS = 64  # of one program, the row operand of the tensor core; fewer are padded
_PROGRAMS = 132  # that fill an H200: registers and shared memory have room for one on each multiprocessor
_MAX_SPLITS = 128
_COMBINE_UNROLL = 16


def decode_attention(
    q: torch.Tensor, keys: Sequence[PoolKeys], ending: Ending, num_splits: int | None, step: Step = DEFAULT_STEP
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, keys, ending, num_splits, step, out, None)
    return out


def decode_attention_fp8(
    q: torch.Tensor, keys: Sequence[PoolKeys], ending: Ending, num_splits: int | None, step: Step = DEFAULT_STEP
) -> tuple[torch.Tensor, torch.Tensor]:
    out, codes = empty_fp8(q)
    _launch(q, keys, ending, num_splits, step, out, codes)
    return out, codes


def _launch(q, keys, ending, num_splits, step, out, codes) -> None:
    """Fills `out` in bf16, or with `codes` in E4M3 and scale bytes."""
    num_tokens, num_heads, dim = q.shape
    if num_tokens == 0:
        return
    head_blocks = triton.cdiv(num_heads, _HEADS)
    blocks = sum(triton.cdiv(one.slots.shape[1], step.keys) for one in keys)
    if num_splits is None:
        num_splits = min(_MAX_SPLITS, max(1, _PROGRAMS // (num_tokens * head_blocks)), max(1, blocks))
        num_splits = triton.cdiv(blocks, triton.cdiv(blocks, num_splits)) if blocks else 1  # no empty ones
    acc = state = None
    if num_splits > 1:
        acc = torch.empty((num_splits, num_tokens, num_heads, dim), dtype=torch.float32, device=q.device)
        # Per split, token and head: the largest logit in units of ln 2, and the sum of the numerators.
        state = torch.empty((num_splits, num_tokens, num_heads, 2), dtype=torch.float32, device=q.device)
    sink, turns, ptx = ending.sink, turns_of(ending), uses_ptx(q)
    first, second = keys[0], keys[-1]  # a single pool stands for both; the second one has no columns
    views = [pool_views(first.pool), pool_views(second.pool)]
    rows = [first.slots.contiguous(), second.slots.contiguous()]
    columns = (rows[0].shape[1], rows[1].shape[1] if len(keys) > 1 else 0)
    attend_kernel[(num_splits, num_tokens, head_blocks)](
        q.contiguous(), views[0].values, rows[0], first.counts, columns[0], views[0].num_slots,
        views[0].page_bytes // ROW_BYTES.value, views[1].values, rows[1], second.counts, columns[1],
        views[1].num_slots, views[1].page_bytes // ROW_BYTES.value, acc, state, sink, turns, out, codes,
        triton.cdiv(blocks, num_splits), num_tokens, num_heads, ending.scale / math.log(2),
        ROWS0=first.pool.rows_per_page, ROWS1=second.pool.rows_per_page, KIND=first.pool.format.kind, HEADS=_HEADS,
        KEYS=step.keys, USE_PTX=ptx, num_warps=8, num_stages=step.stages, launch_pdl=ptx,
    )  # fmt: skip
    if num_splits > 1:
        combine_kernel[(num_tokens, num_heads)](
            acc, state, sink, turns, out, codes, num_splits, num_tokens, num_heads,
            SPLITS=triton.next_power_of_2(num_splits), UNROLL=_COMBINE_UNROLL, USE_PTX=ptx, num_warps=4, launch_pdl=ptx,
        )  # fmt: skip
