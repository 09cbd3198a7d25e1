"""Decode attention in Triton: partial sums over parts of the keys, then one launch that merges them."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from collections.abc import Sequence

import torch
import triton

from dsv4_kernels.attention.decode.triton_kernels import combine_kernel, split_kernel
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.kv.triton_rows import pool_views
from dsv4_kernels.triton_pdl import uses_ptx

_KEYS = 32  # per step
_HEADS = 64  # of one program, the row operand of the tensor core; fewer are padded
_PROGRAMS = 66  # pairs of programs that fill an H200: its shared memory has room for one program each
_MAX_SPLITS = 64
_COMBINED_HEADS = 4


def decode_attention(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor | None],
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    num_splits: int | None,
) -> torch.Tensor:
    num_tokens, num_heads, dim = q.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    if num_tokens == 0:
        return out
    head_blocks = triton.cdiv(num_heads, _HEADS)
    blocks = [triton.cdiv(rows.shape[1], _KEYS) for rows in slots]
    if num_splits is None:
        num_splits = min(_MAX_SPLITS, max(1, _PROGRAMS // (num_tokens * head_blocks)), max(1, sum(blocks)))
    acc = torch.empty((num_splits, num_tokens, num_heads, dim), dtype=torch.float32, device=q.device)
    # Per split, token and head: the largest logit in units of ln 2, and the sum of the numerators.
    state = torch.empty((num_splits, num_tokens, num_heads, 2), dtype=torch.float32, device=q.device)
    ptx = uses_ptx(q)
    second = len(pools) - 1  # a single pool stands for both; the second one has no columns
    views = [pool_views(pools[0]), pool_views(pools[second])]
    rows = [slots[0].contiguous(), slots[second].contiguous()]
    columns = (rows[0].shape[1], rows[1].shape[1] if second else 0)
    split_kernel[(num_splits, num_tokens, 2 * head_blocks)](
        q, views[0].values, views[0].tail, views[0].codes, rows[0], counts[0], columns[0], views[0].num_slots,
        views[0].page_bytes, views[0].page_bytes // 2, views[1].values, views[1].tail, views[1].codes, rows[1],
        counts[second], columns[1], views[1].num_slots, views[1].page_bytes, views[1].page_bytes // 2, acc, state,
        triton.cdiv(sum(blocks), num_splits), num_tokens, num_heads, scale / math.log(2), ROWS0=pools[0].rows_per_page,
        ROWS1=pools[second].rows_per_page, KIND0=pools[0].format.kind, KIND1=pools[second].format.kind, HEADS=_HEADS,
        KEYS=_KEYS, HAS_SECOND=second == 1, USE_PTX=ptx, num_warps=8, num_stages=2, launch_pdl=ptx,
    )  # fmt: skip
    combine_kernel[(num_tokens, triton.cdiv(num_heads, _COMBINED_HEADS))](
        acc, state, sink, None if cis is None else torch.view_as_real(cis).contiguous(), out, num_splits, num_tokens,
        num_heads, HEADS=_COMBINED_HEADS, USE_PTX=ptx, num_warps=4, launch_pdl=ptx,
    )  # fmt: skip
    return out
