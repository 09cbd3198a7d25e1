"""Latent row to cache row as the composition of its formulas. Source: spec 4.3."""

import torch

from dsv4_kernels.kv.rows import PagedRows, round_rows
from dsv4_kernels.rope.reference import norm_rope


def insert(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, cis: torch.Tensor, pool: PagedRows, slots: torch.Tensor
) -> torch.Tensor:
    rows = norm_rope(kv, weight, eps, cis)
    num_slots = pool.num_pages * pool.rows_per_page
    pool.write(torch.where((slots >= 0) & (slots < num_slots), slots, -1), rows)
    return round_rows(pool.format, rows).to(kv.dtype)
