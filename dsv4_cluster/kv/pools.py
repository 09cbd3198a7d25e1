"""The cache memory of one engine: tensors only, no ownership."""

from dataclasses import dataclass
from typing import Self

import torch

from dsv4_cluster.kv.layout import KVLayout, LayerLayout
from dsv4_cluster.kv.views import LayerCache
from dsv4_kernels.kv.rows import PagedRows, RowFormat


@dataclass(frozen=True, slots=True)
class KVPools:
    """All pools of all layers. Page ids index compressed and indexer pools, sequence slots index the rings."""

    layout: KVLayout
    num_pages: int
    num_slots: int
    layer_caches: tuple[LayerCache, ...]  # one per layer, MTP layers last

    @classmethod
    def allocate(cls, layout: KVLayout, num_pages: int, num_slots: int, device: torch.device | str) -> Self:
        """Zero-filled pools for `num_pages` pages of 256 tokens and `num_slots` sequences."""
        caches = tuple(_layer_cache(layout, layer, num_pages, num_slots, device) for layer in layout.layers)
        return cls(layout, num_pages, num_slots, caches)

    @property
    def num_bytes(self) -> int:
        """Memory of all pools, padding included."""
        return self.num_pages * self.layout.page_bytes + self.num_slots * self.layout.seq_slot_bytes

    def copy_page(self, source: int, target: int) -> None:
        """Copy the entries of one page to another, in every layer."""
        for pages in self._paged():
            pages[target].copy_(pages[source])

    def read_page(self, page_id: int) -> torch.Tensor:
        """The bytes of one page over all layers, copied. Returns: [layout.page_bytes] uint8."""
        return torch.cat([pages[page_id] for pages in self._paged()])

    def write_page(self, page_id: int, data: torch.Tensor) -> None:
        """Put bytes from `read_page` into a page."""
        offset = 0
        for pages in self._paged():
            pages[page_id].copy_(data[offset : offset + pages.shape[1]])
            offset += pages.shape[1]

    def _paged(self) -> list[torch.Tensor]:
        """Memory of the pools that pages index: each [num_pages, bytes] uint8."""
        pools = [rows for cache in self.layer_caches for rows in (cache.compressed, cache.indexer)]
        return [rows.pages for rows in pools if rows is not None]


def pool_rows(cache: LayerCache, pool: str) -> tuple[PagedRows, ...]:
    """The rows of one layer that travel under one pool name, in the order of `LayerLayout.formats`."""
    rows = {
        "window": (cache.window,),
        "compressed": (cache.compressed,),
        "indexer": (cache.indexer,),
        "state": (cache.state, cache.indexer_state),
        "last_hidden": (cache.hidden,),
    }[pool]
    return tuple(part for part in rows if part is not None)


def _layer_cache(
    layout: KVLayout, layer: LayerLayout, num_pages: int, num_slots: int, device: torch.device | str
) -> LayerCache:
    def ring(fmt: RowFormat | None, num_rows: int) -> PagedRows | None:
        return None if fmt is None else PagedRows.allocate(fmt, num_slots, num_rows, device)

    def paged(fmt: RowFormat | None) -> PagedRows | None:
        return None if fmt is None else PagedRows.allocate(fmt, num_pages, layer.entries_per_page, device)

    return LayerCache(
        ratio=layer.ratio,
        window=PagedRows.allocate(layer.window, num_slots, layout.window_ring, device),
        compressed=paged(layer.compressed),
        indexer=paged(layer.indexer),
        state=ring(layer.state, layout.state_ring(layer)),
        indexer_state=ring(layer.indexer_state, layout.state_ring(layer)),
        hidden=ring(layer.hidden, layout.hidden_ring),
    )
