"""What a resumed sequence needs besides its pages: window rows, CSA rows and the last hidden state of one boundary.

At a multiple of 128 tokens no HCA block is unfinished and every CSA block is complete, so all snapshots have one size:
the last `sliding_window` window rows of every layer, the 4 rows of the last CSA block, and the residual streams of the
last position, which the first MTP row after a resume is made of. Source: spec 6.6.
"""

from collections.abc import Iterator

import torch

from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.page_table import ring_slots
from dsv4_cluster.kv.pools import KVPools, pool_rows
from dsv4_cluster.kv.snapshot import RING_POOLS, live_positions, live_segment_shapes
from dsv4_kernels.kv.rows import PagedRows

_ALIGN_BYTES = 16  # so that every snapshot starts aligned for the widest copies


def snapshot_bytes(layout: KVLayout, hidden_bytes: int) -> int:
    """Size of one snapshot. hidden_bytes: of the residual streams of one position."""
    num_tokens = _largest_boundary(layout)
    rows = sum(s.num_bytes for s in live_segment_shapes(layout, num_tokens) if s.pool in RING_POOLS)
    return -(-(rows + hidden_bytes) // _ALIGN_BYTES) * _ALIGN_BYTES


class SnapshotPool:
    """Fixed rows of bytes next to the cache pools; who uses which row is decided elsewhere."""

    def __init__(
        self, pools: KVPools, num_snapshots: int, *, hidden_shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """hidden_shape: (hc_mult, hidden_size) of the residual streams. dtype: theirs."""
        self._pools = pools
        self._hidden_shape = hidden_shape
        self._dtype = dtype
        self._hidden_bytes = hidden_shape[0] * hidden_shape[1] * dtype.itemsize
        width = snapshot_bytes(pools.layout, self._hidden_bytes)
        device = pools.layer_caches[0].window.pages.device
        # A row is always written before it is read, so the memory need not be touched here.
        self.rows = torch.empty(num_snapshots, width, dtype=torch.uint8, device=device)  # [num_snapshots, bytes]

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self.rows.numel()

    def save(self, snapshot_id: int, slot: int, num_tokens: int, last_hidden: torch.Tensor | None) -> None:
        """Copy a boundary out of the rings of `slot`, which must still hold its rows.

        num_tokens: the boundary. last_hidden: [hc_mult, hidden_size], streams of position num_tokens - 1; None where
        nothing will ask for them.
        """
        data, offset = self.rows[snapshot_id], self._hidden_bytes
        hidden = data[:offset].view(self._dtype).view(self._hidden_shape)
        if last_hidden is None:
            hidden.zero_()
        else:
            hidden.copy_(last_hidden)
        for rows, slots in self._ring_rows(slot, num_tokens):
            num_bytes = slots.shape[0] * rows.row_bytes
            data[offset : offset + num_bytes].copy_(rows.read_raw(slots).view(-1))
            offset += num_bytes

    def load(self, snapshot_id: int, slot: int, num_tokens: int) -> torch.Tensor:
        """Copy a boundary into the rings of `slot`. Returns: [hc_mult, hidden_size], its last hidden state, copied."""
        data, offset = self.rows[snapshot_id], self._hidden_bytes
        for rows, slots in self._ring_rows(slot, num_tokens):
            num_bytes = slots.shape[0] * rows.row_bytes
            rows.write_raw(slots, data[offset : offset + num_bytes].view(-1, rows.row_bytes))
            offset += num_bytes
        return data[: self._hidden_bytes].view(self._dtype).view(self._hidden_shape).clone()

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


def _largest_boundary(layout: KVLayout) -> int:
    """A boundary whose window is full."""
    return -(-layout.sliding_window // 128) * 128
