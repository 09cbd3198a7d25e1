"""What a layer sees of the cache: its own pools, nothing of who owns which page."""

from dataclasses import dataclass

from dsv4_kernels.kv.rows import PagedRows


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Pools of one layer. `window` and the states are rings: row = position mod ring size, page = sequence slot."""

    ratio: int  # 0 = window only, 4 = CSA, 128 = HCA
    window: PagedRows  # [num_seq_slots, ring] rows of head_dim
    compressed: PagedRows | None = None  # [num_pages, 256 / ratio] rows of head_dim, addressed through the page table
    indexer: PagedRows | None = None  # CSA: [num_pages, 64] rows of index_head_dim
    state: PagedRows | None = None  # [num_seq_slots, ring] fp32 rows of 2 * c * head_dim: kv, then gate with ape
    indexer_state: PagedRows | None = None  # CSA: the same for the indexer, rows of 2 * 2 * index_head_dim
    hidden: PagedRows | None = None  # MTP: [num_seq_slots, ring] rows of hc_mult * hidden_size
