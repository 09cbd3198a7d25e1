"""What a resumed sequence needs besides its pages: the live ring rows of one boundary, packed into two rows of bytes.

| row    | live rows of every layer                                        | grows with                 |
|--------|-----------------------------------------------------------------|----------------------------|
| window | the sliding window, without the MTP layers' row of the last one | layers, cache precision    |
| state  | the last CSA block, and the last hidden state of the MTP layers | CSA layers; always precise |

At a multiple of 128 tokens no HCA block is unfinished and every CSA block is complete, so all snapshots have one size.
A boundary is of use only with both rows. So one id stands for both and they come and go together: pools with numbers of
their own would leave rows in the larger one that nothing can use. Their bytes are counted apart. Source: spec 6.6.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.page_table import ring_slots
from dsv4_cluster.kv.pools import KVPools, pool_rows
from dsv4_cluster.kv.snapshot import RING_POOLS, live_positions, live_segment_shapes
from dsv4_kernels.kv.rows import PagedRows

_BOUNDARY_TOKENS = 128
_ALIGN_BYTES = 16  # so that every row starts aligned for the widest copies
_WINDOW_POOLS = ("window",)
_STATE_POOLS = tuple(pool for pool in RING_POOLS if pool not in _WINDOW_POOLS)


@dataclass(frozen=True, slots=True)
class SnapshotBytes:
    """Size of the two rows of one snapshot, padding included."""

    window: int
    state: int  # last hidden state included

    @classmethod
    def of(cls, layout: KVLayout) -> Self:
        """Sizes in one layout."""
        return cls(_row_bytes(layout, _WINDOW_POOLS), _row_bytes(layout, _STATE_POOLS))


class SnapshotPool:
    """Fixed rows of bytes next to the cache pools; who uses which id is decided elsewhere."""

    def __init__(self, pools: KVPools, num_snapshots: int) -> None:
        self._pools = pools
        self.row_bytes = SnapshotBytes.of(pools.layout)
        device = pools.layer_caches[0].window.pages.device
        # Zeros touch the memory: a machine that is short of it shows that while loading, not in a later prompt.
        self.windows = torch.zeros(num_snapshots, self.row_bytes.window, dtype=torch.uint8, device=device)
        self.states = torch.zeros(num_snapshots, self.row_bytes.state, dtype=torch.uint8, device=device)

    def save(self, snapshot_id: int, slot: int, num_tokens: int) -> None:
        """Copy the boundary `num_tokens` out of the rings of `slot`, which must still hold its rows."""
        parts = self._parts(self.windows[snapshot_id], self.states[snapshot_id], slot, num_tokens)
        for data, rows, slots in parts:
            data.copy_(rows.read_raw(slots).view(-1))

    def load(self, snapshot_id: int, slot: int, num_tokens: int) -> None:
        """Copy the boundary `num_tokens` into the rings of `slot`."""
        self._load(self.windows[snapshot_id], self.states[snapshot_id], slot, num_tokens)

    def read_bytes(self, snapshot_id: int) -> torch.Tensor:
        """A copy of a snapshot. Returns: [window row, then state row] uint8."""
        return torch.cat([self.windows[snapshot_id], self.states[snapshot_id]])

    def load_bytes(self, data: torch.Tensor, slot: int, num_tokens: int) -> None:
        """Like `load`, from what `read_bytes` returned, on any device."""
        sizes = [self.row_bytes.window, self.row_bytes.state]
        assert data.dtype == torch.uint8 and data.shape == (sum(sizes),), (data.dtype, data.shape, sizes)
        window, state = data.to(self.windows.device).split(sizes)
        self._load(window, state, slot, num_tokens)

    def _load(self, window: torch.Tensor, state: torch.Tensor, slot: int, num_tokens: int) -> None:
        for data, rows, slots in self._parts(window, state, slot, num_tokens):
            rows.write_raw(slots, data.view(-1, rows.row_bytes))

    def _parts(
        self, window: torch.Tensor, state: torch.Tensor, slot: int, num_tokens: int
    ) -> Iterator[tuple[torch.Tensor, PagedRows, torch.Tensor]]:
        """Bytes of a snapshot's two rows in their order, each run with the ring rows it belongs to and their slots."""
        layout = self._pools.layout
        known: dict[tuple[range, int], torch.Tensor] = {}
        for data, ring_pools in ((window, _WINDOW_POOLS), (state, _STATE_POOLS)):
            offset = 0
            for layer, cache in zip(layout.layers, self._pools.layer_caches, strict=True):
                for pool in ring_pools:
                    live = live_positions(pool, layer, num_tokens, layout.sliding_window)
                    for rows in pool_rows(cache, pool) if live else ():
                        ring = (live, rows.rows_per_page)
                        if ring not in known:
                            known[ring] = ring_slots(slot, live.start, live.stop, rows.rows_per_page, data.device)
                        num_bytes = len(live) * rows.row_bytes
                        yield data[offset : offset + num_bytes], rows, known[ring]
                        offset += num_bytes


def _row_bytes(layout: KVLayout, ring_pools: tuple[str, ...]) -> int:
    num_tokens = -(-layout.sliding_window // _BOUNDARY_TOKENS) * _BOUNDARY_TOKENS  # a boundary whose window is full
    num_bytes = sum(shape.num_bytes for shape in live_segment_shapes(layout, num_tokens) if shape.pool in ring_pools)
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
