"""Decode attention as the composition of its formulas. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.attention.checks import OUT_GROUP
from dsv4_kernels.attention.keys import Ending, PoolKeys
from dsv4_kernels.attention.reference import named_slots, paged_attention
from dsv4_kernels.quant.reference import quantise_fp8
from dsv4_kernels.rope.reference import apply_rope_


def decode_attention(
    q: torch.Tensor,
    keys: Sequence[PoolKeys],
    ending: Ending,
    num_splits: int | None,  # noqa: ARG001 - the formula has one sum
) -> torch.Tensor:
    named = [named_slots(one.pool, one.slots, one.counts) for one in keys]
    out = paged_attention(q, [one.pool for one in keys], named, ending.sink, ending.scale)
    return out if ending.cis is None else apply_rope_(out, ending.cis[:, None], inverse=True)


def decode_attention_fp8(
    q: torch.Tensor, keys: Sequence[PoolKeys], ending: Ending, num_splits: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = decode_attention(q.float(), keys, ending, num_splits)
    return quantise_fp8(out.flatten(1), OUT_GROUP)
