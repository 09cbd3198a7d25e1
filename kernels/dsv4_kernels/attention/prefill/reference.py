"""Prefill attention as the composition of its formulas. Source: spec 4.3."""

import torch

from dsv4_kernels.attention.checks import OUT_GROUP
from dsv4_kernels.attention.keys import Ending, PoolKeys, WindowKeys
from dsv4_kernels.attention.reference import masked_attention, named_slots
from dsv4_kernels.quant.reference import quantise_fp8
from dsv4_kernels.rope.reference import apply_rope_

_TILE = 64  # queries whose pool rows are gathered at once


def prefill_attention(q: torch.Tensor, window: WindowKeys, entries: PoolKeys | None, ending: Ending) -> torch.Tensor:
    out = torch.empty_like(q)
    row = torch.arange(window.rows.shape[0], device=q.device)
    for first in range(0, q.shape[0], _TILE):
        part = slice(first, first + _TILE)
        kv = [window.rows]
        masks = [(row >= window.begin[part, None]) & (row < window.end[part, None])]
        if entries is not None:
            slots = entries.slots.expand(q.shape[0], -1)[part]
            named = named_slots(entries.pool, slots, None if entries.counts is None else entries.counts[part])
            kv.append(entries.pool.gather(named))
            masks.append(named >= 0)
        out[part] = masked_attention(q[part], kv, masks, ending.sink, ending.scale)
    return out if ending.cis is None else apply_rope_(out, ending.cis[:, None], inverse=True)


def prefill_attention_fp8(
    q: torch.Tensor, window: WindowKeys, entries: PoolKeys | None, ending: Ending
) -> tuple[torch.Tensor, torch.Tensor]:
    out = prefill_attention(q.float(), window, entries, ending)
    return quantise_fp8(out.flatten(1), OUT_GROUP)
