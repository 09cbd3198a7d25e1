"""Segments in plain torch. The checksum is defined here; see op.py for its formula."""

import torch

from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.sampling.reference import mix64

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
WORD_BYTES = 8


def checksum(raw: torch.Tensor) -> torch.Tensor:
    padding = -raw.shape[1] % WORD_BYTES
    words = torch.nn.functional.pad(raw, (0, padding)).contiguous().view(torch.int64).flatten()
    keys = torch.arange(1, words.numel() + 1, device=raw.device) * GOLDEN
    return mix64(words + keys).sum().view(1) + raw.numel()


def pack(pool: PagedRows, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_row = _is_row(pool, slots)
    raw = pool.read_raw(torch.where(is_row, slots, 0)).masked_fill_(~is_row[:, None], 0)
    return raw, checksum(raw)


def unpack(pool: PagedRows, slots: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    pool.write_raw(torch.where(_is_row(pool, slots), slots, -1), raw)
    return checksum(raw)


def _is_row(pool: PagedRows, slots: torch.Tensor) -> torch.Tensor:
    return (slots >= 0) & (slots < pool.num_pages * pool.rows_per_page)
