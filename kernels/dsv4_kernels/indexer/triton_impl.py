"""Indexer in Triton: scan pages of keys, then an exact radix selection. A row's bits do not depend on its batch.

Scan: a program scores a chunk of one token's entries on the tensor cores, stores every score as an integer that orders
like it, and adds a histogram of the leading bits to the token's. Gather: programs find the bin in which the last
selected entry lies and list everything from there up. Select: one program per token narrows that list digit by digit,
by score and then by entry, until exactly `topk` are above the threshold, sorts them and names their slots.

Everything runs on launch sizes of the page table; lengths are read on the device, and a token that sees no more than
`topk` entries is neither scanned nor searched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton

from dsv4_kernels.indexer import reference
from dsv4_kernels.indexer.triton_scan import scan_kernel
from dsv4_kernels.indexer.triton_select import NUM_BINS, gather_kernel, select_kernel
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.kv.triton_rows import pool_views

_WORKSPACE_VALUES = 1 << 25  # scores held at once, and as many candidates: 128 MiB each
_MAX_TOKENS = 1 << 15  # of one launch: limit of a grid's second dimension
_TILE, _TILES = 128, 16  # entries of one product, products of one program
_STAGES = 5  # two for the page numbers, two for the keys behind them, one in use: with 3, no key is on its way ahead
_GATHERED = 4096  # entries of one program
_LISTED = 8192  # candidates that the selection reads at once: about what one bin holds of 262,144 entries
_COUNTS = NUM_BINS + 16  # integers of a token's histogram; behind the bins the number of candidates

hadamard = reference.hadamard
index_scores = reference.index_scores
select_topk = reference.select_topk
index_topk = reference.index_topk


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
    num_tokens, num_heads, dim = q.shape
    columns = page_table.shape[1]
    width = columns * pool.rows_per_page
    slots = torch.empty(num_tokens, topk, dtype=torch.int64, device=q.device)
    lengths = torch.empty(num_tokens, dtype=torch.int32, device=q.device)
    q, weights, page_table = q.contiguous(), weights.contiguous(), page_table.contiguous()
    views = pool_views(pool)
    step = max(1, min(num_tokens, _MAX_TOKENS, _WORKSPACE_VALUES // max(1, width)))
    ordered = torch.empty(step, width, dtype=torch.int32, device=q.device)
    candidates = torch.empty(step, width, dtype=torch.int32, device=q.device)
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        part = slice(first, first + count)
        counts = torch.zeros(count, _COUNTS, dtype=torch.int32, device=q.device)
        if width > topk:
            scan_kernel[(triton.cdiv(width, _TILE * tiles), count)](
                q[part], weights[part], views.values, views.tail, views.codes, page_table, seqs[part],
                num_visible[part], ordered, counts, columns, width, topk, PAGE_BYTES=views.page_bytes, H=num_heads,
                HEADS=max(16, triton.next_power_of_2(num_heads)), D=dim, ROWS=pool.rows_per_page, KIND=fmt.kind,
                TILE=_TILE, TILES=tiles, BINS=NUM_BINS, COUNTS=_COUNTS, num_warps=4, num_stages=_STAGES,
            )  # fmt: skip
            gather_kernel[(triton.cdiv(width, _GATHERED), count)](
                ordered, counts, num_visible[part], candidates, width, topk, BLOCK=_GATHERED, BINS=NUM_BINS,
                COUNTS=_COUNTS, num_warps=8,
            )  # fmt: skip
        select_kernel[(count,)](
            ordered, counts, candidates, page_table, seqs[part], num_visible[part], slots[part], lengths[part],
            columns, width, topk, ROWS=pool.rows_per_page, WIDTH=triton.next_power_of_2(topk), BLOCK=_LISTED,
            BINS=NUM_BINS, COUNTS=_COUNTS, num_warps=16,
        )  # fmt: skip
    return slots, lengths
