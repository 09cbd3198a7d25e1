"""The live bytes of a sequence: what a decode engine needs to go on after `num_tokens`, and nothing else.

| pool        | live rows of n tokens                                                                       |
|-------------|---------------------------------------------------------------------------------------------|
| window      | positions n - min(n, window) .. n-1                                                         |
| window, MTP | the same without n-1: that row depends on token n and is computed on resume                 |
| compressed  | entries 0 .. n // ratio - 1                                                                 |
| indexer     | entries 0 .. n // 4 - 1                                                                     |
| state, CSA  | positions of the block before and of the unfinished block: max(0, (n // 4 - 1) * 4) .. n-1  |
| state, HCA  | positions of the unfinished block: (n // 128) * 128 .. n-1                                  |
| last_hidden | position n-1, from which the missing MTP row is computed                                    |

One segment per pool and run of consecutive layers whose rows look alike; a segment holds layer after layer, within a
layer the main state before the indexer state, within those row after row in position order. Page ids, ring geometry and
pool sizes do not show in the bytes. Segments without rows do not exist. Source: spec 6.5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from dsv4_cluster.errors import KVTransferError, SegmentCorruptError
from dsv4_cluster.kv.layout import KVLayout, LayerLayout, row_bytes
from dsv4_cluster.kv.page_table import num_pages_for, paged_slots, ring_slots
from dsv4_cluster.kv.pools import KVPools, pool_rows
from dsv4_cluster.protocol.handoff import POOLS
from dsv4_kernels.kv.rows import PagedRows

RING_POOLS = ("window", "state", "last_hidden")


class SegmentShape(NamedTuple):
    """What a segment must look like; both ends derive it from layout and length."""

    pool: str  # one of POOLS
    layer_start: int
    layer_end: int  # exclusive
    num_rows: int  # of all layers together
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSegment:
    """One contiguous run of live cache bytes."""

    pool: str  # one of POOLS
    layer_start: int
    layer_end: int  # exclusive
    num_rows: int  # of all layers together
    data: torch.Tensor  # [num_bytes] uint8, contiguous


def live_segment_shapes(layout: KVLayout, num_tokens: int) -> list[SegmentShape]:
    """Segments of a sequence of `num_tokens` tokens, in payload order: the receiver's expectation."""
    return [shape for pool in POOLS for shape in _pool_shapes(layout, pool, num_tokens)]


def export_live(pools: KVPools, page_ids: Sequence[int], slot: int, num_tokens: int) -> list[LiveSegment]:
    """Copy a sequence's live bytes out of the pools.

    page_ids, slot: what the sequence owns. num_tokens: tokens whose rows are written.
    Returns: segments as `live_segment_shapes` lists them, on the pools' device.
    """
    segments = []
    for shape in live_segment_shapes(pools.layout, num_tokens):
        parts = [
            rows.read_raw(slots).view(-1) for rows, slots in _parts(pools, shape, page_ids, slot, num_tokens)
        ]  # each [rows * row_bytes]
        segments.append(
            LiveSegment(
                pool=shape.pool,
                layer_start=shape.layer_start,
                layer_end=shape.layer_end,
                num_rows=shape.num_rows,
                data=parts[0] if len(parts) == 1 else torch.cat(parts),
            )
        )
    return segments


def import_live(
    pools: KVPools, page_ids: Sequence[int], slot: int, num_tokens: int, segments: Sequence[LiveSegment]
) -> None:
    """Write exported live bytes into the pages and the slot of a new owner; every other row stays as it is.

    Raises: KVTransferError when segments are missing or are not those of `num_tokens` tokens in this layout,
    SegmentCorruptError when a segment's bytes have the wrong length. Then nothing is written.
    """
    assert len(page_ids) >= num_pages_for(num_tokens), f"{len(page_ids)} pages for {num_tokens} tokens"
    shapes = live_segment_shapes(pools.layout, num_tokens)
    _check_segments(shapes, segments, num_tokens)
    for shape, segment in zip(shapes, segments, strict=True):
        offset = 0
        for rows, slots in _parts(pools, shape, page_ids, slot, num_tokens):
            num_bytes = slots.shape[0] * rows.row_bytes
            raw = segment.data[offset : offset + num_bytes].to(slots.device).view(-1, rows.row_bytes)
            rows.write_raw(slots, raw)
            offset += num_bytes


def live_positions(pool: str, layer: LayerLayout, num_tokens: int, sliding_window: int) -> range:
    """Live rows of one layer: token positions in ring pools, entry numbers in paged ones."""
    if not layer.formats(pool):
        return range(0)
    if pool == "window":
        return range(max(0, num_tokens - sliding_window), num_tokens - layer.is_mtp)
    if pool == "last_hidden":
        return range(max(0, num_tokens - 1), num_tokens)
    if pool == "state":
        first_block = num_tokens // layer.ratio - (layer.num_state_blocks - 1)
        return range(max(0, first_block * layer.ratio), num_tokens)
    return range(num_tokens // layer.ratio)


def _pool_shapes(layout: KVLayout, pool: str, num_tokens: int) -> list[SegmentShape]:
    """Runs of consecutive layers with the same formats and the same live rows."""

    def look(layer_id: int) -> tuple[object, range]:
        layer = layout.layers[layer_id]
        return layer.formats(pool), live_positions(pool, layer, num_tokens, layout.sliding_window)

    shapes = []
    for (_, live), run in groupby(range(len(layout.layers)), key=look):
        layer_ids = list(run)
        if not live:
            continue
        formats = layout.layers[layer_ids[0]].formats(pool)
        num_bytes = len(layer_ids) * len(live) * sum(row_bytes(fmt) for fmt in formats)
        num_rows = len(layer_ids) * len(live) * len(formats)
        shapes.append(SegmentShape(pool, layer_ids[0], layer_ids[-1] + 1, num_rows, num_bytes))
    return shapes


def _parts(
    pools: KVPools, shape: SegmentShape, page_ids: Sequence[int], slot: int, num_tokens: int
) -> list[tuple[PagedRows, torch.Tensor]]:
    """Rows of a segment in payload order, each with its flat slots."""
    parts = []
    for layer_id in range(shape.layer_start, shape.layer_end):
        layout = pools.layout
        live = live_positions(shape.pool, layout.layers[layer_id], num_tokens, layout.sliding_window)
        for rows in pool_rows(pools.layer_caches[layer_id], shape.pool):
            device = rows.pages.device
            if shape.pool in RING_POOLS:
                slots = ring_slots(slot, live.start, live.stop, rows.rows_per_page, device)
            else:
                slots = paged_slots(page_ids, live.start, live.stop, rows.rows_per_page, device)
            parts.append((rows, slots))
    return parts


def _check_segments(shapes: Sequence[SegmentShape], segments: Sequence[LiveSegment], num_tokens: int) -> None:
    if len(segments) != len(shapes):
        raise KVTransferError(f"{len(segments)} segments for {num_tokens} tokens, this layout has {len(shapes)}")
    for i, (shape, segment) in enumerate(zip(shapes, segments, strict=True)):
        found = (segment.pool, segment.layer_start, segment.layer_end, segment.num_rows)
        if found != shape[:4]:
            raise KVTransferError(
                f"segment {i} is (pool, layer_start, layer_end, num_rows) = {found}, expected {shape[:4]}"
            )
        if segment.data.dtype != torch.uint8 or tuple(segment.data.shape) != (shape.num_bytes,):
            raise SegmentCorruptError(
                f"segment {i} ({shape.pool}) is {segment.data.dtype} of shape {tuple(segment.data.shape)}, "
                f"expected {shape.num_bytes} bytes"
            )
