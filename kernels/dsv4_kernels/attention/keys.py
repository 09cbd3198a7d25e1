"""What tokens attend to, and how their sums end: the arguments that all implementations of an op share."""

from dataclasses import dataclass

import torch

from dsv4_kernels.kv.rows import PagedRows


@dataclass(frozen=True, slots=True)
class WindowKeys:
    """Successive rows of one dense tensor, a range per token: the rows before the chunk, then its own."""

    rows: torch.Tensor  # [N, 512] bf16, as the cache would read them back
    begin: torch.Tensor  # [T] int64, first row of each token's window
    end: torch.Tensor  # [T] int64, one past the last


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """Rows of a pool: those of each token's own list or, for a chunk, one list of which tokens see the beginning."""

    pool: PagedRows  # "kv_fp8" with 64 rotary values, or plain bf16
    slots: torch.Tensor  # [T, K] int64, or [1, K] for all tokens; a negative one or one beyond the pool is none
    counts: torch.Tensor | None = None  # [T] int64, columns from there on are none


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Dense rows for queries in blocks, each block with its own list of them.

    Column c of a block's window list is position `window_first[block] + c`; a query at t sees the last `window`
    positions up to t. Column c of its list of entries is visible to a query when c < num_visible.
    """

    block_tokens: int  # queries of a block
    positions: torch.Tensor  # [T] int64, absolute
    window_rows: torch.Tensor  # [N, dim] of q's dtype
    window_ids: torch.Tensor  # [blocks, C] int64 row numbers, -1 = none; C a multiple of 16
    window_first: torch.Tensor  # [blocks] int64, multiples of 16
    window: int
    entry_rows: torch.Tensor | None = None  # [M, dim]; None = no entries, then the next two as well
    entry_ids: torch.Tensor | None = None  # [blocks, K], or [K] for one list of all blocks; K a multiple of 16
    num_visible: torch.Tensor | None = None  # [T] int64


@dataclass(frozen=True, slots=True)
class Ending:
    """How logits become weights, and what happens to the sums."""

    sink: torch.Tensor | None  # [H] fp32 raw logits
    cis: torch.Tensor | None  # [T, 32] complex64, by which the last 64 dims are rotated back; None = they stay
    scale: float  # of the logits
