"""What a resumed sequence needs besides its pages: the live ring rows of one boundary, packed into one row of bytes.

At a multiple of 128 tokens no HCA block is unfinished and every CSA block is complete, so all snapshots have one size:
the window rows of every layer, the 4 rows of the last CSA block, and whatever else is live in a ring. Source: spec 6.6.
"""

from collections.abc import Iterator

import torch

from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.page_table import ring_slots
from dsv4_cluster.kv.pools import KVPools, pool_rows
from dsv4_cluster.kv.snapshot import RING_POOLS, live_positions, live_segment_shapes
from dsv4_kernels.kv.rows import PagedRows

_BOUNDARY_TOKENS = 128
_ALIGN_BYTES = 16  # so that every snapshot starts aligned for the widest copies


def snapshot_bytes(layout: KVLayout) -> int:
    """Size of one snapshot."""
    num_tokens = -(-layout.sliding_window // _BOUNDARY_TOKENS) * _BOUNDARY_TOKENS  # a boundary whose window is full
    rows = sum(s.num_bytes for s in live_segment_shapes(layout, num_tokens) if s.pool in RING_POOLS)
    return -(-rows // _ALIGN_BYTES) * _ALIGN_BYTES


class SnapshotPool:
    """Fixed rows of bytes next to the cache pools; who uses which row is decided elsewhere."""

    def __init__(self, pools: KVPools, num_snapshots: int) -> None:
        self._pools = pools
        device = pools.layer_caches[0].window.pages.device
        # A row is always written before it is read, so the memory need not be touched here.
        self.rows = torch.empty(num_snapshots, snapshot_bytes(pools.layout), dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self.rows.numel()

    def save(self, snapshot_id: int, slot: int, num_tokens: int) -> None:
        """Copy the boundary `num_tokens` out of the rings of `slot`, which must still hold its rows."""
        data, offset = self.rows[snapshot_id], 0
        for rows, slots in self._ring_rows(slot, num_tokens):
            num_bytes = slots.shape[0] * rows.row_bytes
            data[offset : offset + num_bytes].copy_(rows.read_raw(slots).view(-1))
            offset += num_bytes

    def load(self, snapshot_id: int, slot: int, num_tokens: int) -> None:
        """Copy the boundary `num_tokens` into the rings of `slot`."""
        self.load_bytes(self.rows[snapshot_id], slot, num_tokens)

    def load_bytes(self, data: torch.Tensor, slot: int, num_tokens: int) -> None:
        """The same from a copy of a snapshot. data: [snapshot_bytes] uint8, on any device."""
        data, offset = data.to(self.rows.device), 0
        for rows, slots in self._ring_rows(slot, num_tokens):
            num_bytes = slots.shape[0] * rows.row_bytes
            rows.write_raw(slots, data[offset : offset + num_bytes].view(-1, rows.row_bytes))
            offset += num_bytes

    def _ring_rows(self, slot: int, num_tokens: int) -> Iterator[tuple[PagedRows, torch.Tensor]]:
        """Live ring rows of a boundary with their flat slots, in the order of the bytes."""
        layout = self._pools.layout
        known: dict[tuple[range, int], torch.Tensor] = {}
        for layer, cache in zip(layout.layers, self._pools.layer_caches, strict=True):
            for pool in RING_POOLS:
                live = live_positions(pool, layer, num_tokens, layout.sliding_window)
                for rows in pool_rows(cache, pool) if live else ():
                    ring = (live, rows.rows_per_page)
                    if ring not in known:
                        known[ring] = ring_slots(slot, live.start, live.stop, rows.rows_per_page, self.rows.device)
                    yield rows, known[ring]
