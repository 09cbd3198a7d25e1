"""Decode attention as the composition of its formulas. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.attention.checks import OUT_GROUP
from dsv4_kernels.attention.reference import named_slots, paged_attention
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.quant.reference import quantise_fp8
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
    named = [named_slots(*source) for source in zip(pools, slots, counts, strict=True)]
    out = paged_attention(q, pools, named, sink, scale)
    return out if cis is None else apply_rope_(out, cis[:, None], inverse=True)


def decode_attention_fp8(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor | None],
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = decode_attention(q.float(), pools, slots, counts, sink, cis, scale, num_splits)
    return quantise_fp8(out.flatten(1), OUT_GROUP)
