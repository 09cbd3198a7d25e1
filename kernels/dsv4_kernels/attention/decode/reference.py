"""Decode attention as the composition of its formulas. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.attention.reference import paged_attention
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.rope.reference import apply_rope_


def decode_attention(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor | None],
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    num_splits: int | None,  # noqa: ARG001 - the formula has one sum
) -> torch.Tensor:
    named = [_named(*source) for source in zip(pools, slots, counts, strict=True)]
    out = paged_attention(q, pools, named, sink, scale)
    return out if cis is None else apply_rope_(out, cis[:, None], inverse=True)


def _named(pool: PagedRows, slots: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    is_row = (slots >= 0) & (slots < pool.num_pages * pool.rows_per_page)
    if count is not None:
        is_row &= torch.arange(slots.shape[1], device=slots.device) < count[:, None]
    return torch.where(is_row, slots, -1)
