"""What the tokens of a chunk attend to."""

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
    """Rows of a pool: those that an indexer chose for each token, or one list of which tokens see the beginning."""

    pool: PagedRows  # "kv_fp8" with 64 rotary values, or plain bf16
    slots: torch.Tensor  # [T, K] int64, or [1, K] for all tokens; a negative one or one beyond the pool is none
    counts: torch.Tensor | None  # [T] int64, columns from there on are none
