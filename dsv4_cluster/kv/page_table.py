"""From page ids to addresses: the page table of a batch and the slots of a sequence's rows."""

from collections.abc import Sequence

import numpy as np
import torch

from dsv4_cluster.config.kv_config import PAGE_TOKENS


def num_pages_for(num_tokens: int) -> int:
    """Pages of 256 tokens that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def page_table_rows(page_ids: Sequence[Sequence[int]], device: torch.device | str) -> torch.Tensor:
    """Page table of a batch. page_ids: per sequence, in token order.

    Returns: [B, P] int64, P pages of the longest sequence, -1 = none.
    """
    width = max(map(len, page_ids), default=0)
    table = np.full((len(page_ids), width), -1, dtype=np.int64)
    for row, ids in zip(table, page_ids, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(table).to(device)


def paged_slots(
    page_ids: Sequence[int], first: int, end: int, rows_per_page: int, device: torch.device | str
) -> torch.Tensor:
    """Flat slots of rows first..end-1 of a sequence in a paged pool. Returns: [end - first] int64."""
    pages = torch.tensor(page_ids, dtype=torch.int64, device=device)
    rows = torch.arange(first, end, dtype=torch.int64, device=device)
    page_idx = rows.div(rows_per_page, rounding_mode="floor")
    return pages[page_idx] * rows_per_page + rows - page_idx * rows_per_page


def ring_slots(slot: int, first: int, end: int, ring: int, device: torch.device | str) -> torch.Tensor:
    """Flat slots of positions first..end-1 in the ring of sequence slot `slot`. Returns: [end - first] int64."""
    assert end - first <= ring, f"positions {first}..{end} do not fit a ring of {ring}"
    positions = torch.arange(first, end, dtype=torch.int64, device=device)
    return slot * ring + positions.remainder(ring)
