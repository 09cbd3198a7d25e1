"""Attention through explicit row lists: what every block of queries may see, as `block_attention` wants it.

One form serves decode (a block per token, rows in the pools) and long chunks (a block per 16 tokens, window rows among
the fresh keys). Window columns start at multiples of 16 positions and entries keep their order, so a query's result
does not depend on how its sequence was cut into chunks.
"""

import torch

from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.step_index import Chunk, StepIndex, take
from dsv4_kernels.attention import BlockKeys, block_attention

_ALIGN = 16  # columns and first positions are multiples of this
_BLOCK_TOKENS = 16  # queries of a long chunk that share their lists


def attend_rows(
    q: torch.Tensor,
    index: StepIndex,
    cache: LayerCache,
    entry_slots: torch.Tensor | None,
    *,
    is_selected: bool,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the short chunks, whose window rows are written. q: [R, H, dim].

    entry_slots: [R, K], -1 = none; is_selected: they are picks, not the first K entries. Returns: [R, H, dim].
    """
    first, slots, positions = index.paged_window_columns()
    window_rows, window_ids = cache.window.addressable(slots)
    entry_rows, entry_ids, num_visible = None, None, None
    if entry_slots is not None and cache.compressed is not None and entry_slots.shape[1]:
        entry_rows, entry_ids = cache.compressed.addressable(entry_slots)
        assert index.paged is not None
        num_visible = take(index.num_visible(cache.ratio), index.paged.rows)
        if is_selected:
            num_visible = torch.full_like(num_visible, entry_ids.shape[1])
    keys = BlockKeys(1, positions, window_rows, window_ids, first, index.window, entry_rows, entry_ids, num_visible)
    return block_attention(q, keys, sink=sink, scale=scale)


def attend_chunk(
    q: torch.Tensor,
    keys: torch.Tensor,
    index: StepIndex,
    cache: LayerCache,
    chunk: Chunk,
    selected: torch.Tensor | None,
    *,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of a long chunk. q: [n, H, dim]. keys: [tail + n, dim], window rows up to the chunk's end.

    selected: [n, topk] picks in ascending order, -1 = none, or None for all visible entries. Returns: [n, H, dim].
    """
    span = chunk.span
    block_tokens = 1 if selected is not None else _BLOCK_TOKENS
    first, ids = index.chunk_window_columns(span, block_tokens, keys.shape[0] - span.num_tokens)
    entry_rows, entry_ids, num_visible = None, None, None
    if cache.compressed is not None and span.end >= cache.ratio:
        slots = pad_columns(index.span_entry_slots(span, cache.ratio, cache.compressed.rows_per_page))
        num_visible = index.num_visible(cache.ratio)[span.rows]
        if selected is not None:
            picks = pad_columns(selected)
            slots = torch.where(picks >= 0, slots[picks.clamp(min=0)], -1)
            num_visible = torch.full_like(num_visible, picks.shape[1])
        entry_rows, entry_ids = cache.compressed.addressable(slots)
    positions = index.batch.positions[span.rows]
    seen = BlockKeys(block_tokens, positions, keys, ids, first, index.window, entry_rows, entry_ids, num_visible)
    return block_attention(q, seen, sink=sink, scale=scale)


def pad_columns(ids: torch.Tensor) -> torch.Tensor:
    """ids: [..., K] int64. Returns: [..., K rounded up to 16], the rest -1."""
    missing = -ids.shape[-1] % _ALIGN
    return ids.contiguous() if missing == 0 else torch.nn.functional.pad(ids, (0, missing), value=-1)
