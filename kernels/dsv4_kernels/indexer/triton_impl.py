"""Indexer in Triton: scan pages of keys, then an exact selection. A row's bits do not depend on its batch.

Scan: a program scores a chunk of one token's entries on the tensor cores and stores every score as an integer that
orders like it, and the largest of every 16. Select: one program per token, see `triton_select`.

Everything runs on launch sizes of the page table; lengths are read on the device, and a token that sees no more than
`topk` entries is neither scanned nor searched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Protocol

import torch
import triton

from dsv4_kernels.indexer import reference
from dsv4_kernels.indexer.triton_scan import scan_kernel
from dsv4_kernels.indexer.triton_select import GROUP, select_kernel
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.kv.triton_rows import pool_views
from dsv4_kernels.triton_pdl import uses_ptx

_WORKSPACE_VALUES = 1 << 25  # scores held at once, and as many candidates: 128 MiB each
_MAX_TOKENS = 1 << 15  # of one launch: limit of a grid's second dimension
_TILE, _TILES = 128, 16  # entries of one product, products of one program
_STAGES = 5  # two for the page numbers, two for the keys behind them, one in use: with 3, no key is on its way ahead
_PARTS, _MAX_SPAN = 1024, 16  # of the selection's bound
_BLOCK = 4096  # groups or entries that the selection looks at together
_SELECT_WARPS = 8  # every one more makes each of some 40 sums and scans over a program slower; 16 take 4 us longer
_HELD = 1024  # candidates that it holds in registers

hadamard = reference.hadamard
index_scores = reference.index_scores
select_topk = reference.select_topk
index_topk = reference.index_topk


class Scan(Protocol):
    """Fills `scores` [N, width] int32 and `maxima` [N, ceil(width / GROUP)] int32 for tokens `part` of a call."""

    def __call__(self, part: slice, page_table: torch.Tensor, scores: torch.Tensor, maxima: torch.Tensor) -> None: ...


def index_slots(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: PagedRows,
    page_table: torch.Tensor,
    seqs: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    *,
    tiles: int = _TILES,
) -> tuple[torch.Tensor, torch.Tensor]:
    fmt = pool.format
    if fmt.kind not in ("index_fp8", "index_fp4") or fmt.dim & (fmt.dim - 1) or fmt.dim < 64:
        return reference.index_slots(q, weights, pool, page_table, seqs, num_visible, topk)
    q, weights = q.contiguous(), weights.contiguous()
    views = pool_views(pool)

    def scan(part: slice, page_table: torch.Tensor, scores: torch.Tensor, maxima: torch.Tensor) -> None:
        num_heads, width = q.shape[1], scores.shape[1]
        scan_kernel[(triton.cdiv(width, _TILE * tiles), scores.shape[0])](
            q[part], weights[part], views.values, views.tail, views.codes, page_table, seqs[part], num_visible[part],
            scores, maxima, page_table.shape[1], width, maxima.shape[1], topk, PAGE_BYTES=views.page_bytes, H=num_heads,
            HEADS=max(16, triton.next_power_of_2(num_heads)), D=fmt.dim, ROWS=pool.rows_per_page, KIND=fmt.kind,
            TILE=_TILE, TILES=tiles, num_warps=4, num_stages=_STAGES,
        )  # fmt: skip

    return scan_and_select(scan, pool.rows_per_page, page_table, seqs, num_visible, topk)


def scan_and_select(
    scan: Scan,
    rows_per_page: int,
    page_table: torch.Tensor,
    seqs: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    *,
    max_tokens: int = _MAX_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `index_slots`, with the scores of `scan`; at most `max_tokens` tokens a launch."""
    num_tokens, columns = seqs.shape[0], page_table.shape[1]
    width = columns * rows_per_page
    num_groups = triton.cdiv(triton.cdiv(width, GROUP.value), 16) * 16  # rows of whole vectors
    parts = max(_PARTS, triton.next_power_of_2(topk))
    slots = torch.empty(num_tokens, topk, dtype=torch.int64, device=seqs.device)
    lengths = torch.empty(num_tokens, dtype=torch.int32, device=seqs.device)
    page_table = page_table.contiguous()
    ptx = uses_ptx(seqs) and width > topk  # the scan's launch is complete but for the scores
    step = max(1, min(num_tokens, max_tokens, _WORKSPACE_VALUES // max(1, width)))
    scores, candidates = torch.empty(2, step, width, dtype=torch.int32, device=seqs.device)
    maxima, groups = torch.empty(2, step, num_groups, dtype=torch.int32, device=seqs.device)
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        part = slice(first, first + count)
        if width > topk:
            scan(part, page_table, scores[:count], maxima[:count])
        select_kernel[(count,)](
            scores, maxima, groups, candidates, page_table, seqs[part], num_visible[part], slots[part], lengths[part],
            columns, width, num_groups, topk, ROWS=rows_per_page, WIDTH=triton.next_power_of_2(topk), PARTS=parts,
            SPAN=min(_MAX_SPAN, triton.next_power_of_2(triton.cdiv(num_groups, parts))), BLOCK=_BLOCK, HELD=_HELD,
            USE_PTX=ptx, num_warps=_SELECT_WARPS, launch_pdl=ptx,
        )  # fmt: skip
    return slots, lengths
