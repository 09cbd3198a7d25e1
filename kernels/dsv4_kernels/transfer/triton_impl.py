"""Segments in Triton: programs copy a few rows each, word by word, and add their share of the checksum.

The order in which shares arrive does not matter: the sum is of integers modulo 2^64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from dsv4_kernels.kv.row_codec import section_bytes
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.transfer import reference

_TILE_WORDS = 2048  # per program: 16 per thread
_NUM_WARPS = 4

_GOLDEN = tl.constexpr(-7046029254386353131)
_MIX_1 = tl.constexpr(-4658895280553007687)  # 0xBF58476D1CE4E5B9
_MIX_2 = tl.constexpr(-7723592293110705685)  # 0x94D049BB133111EB


def checksum(raw: torch.Tensor) -> torch.Tensor:
    if raw.shape[1] % 4 or not raw.is_contiguous():
        return reference.checksum(raw)
    return _launch(raw, None, (raw.shape[1],), 1, 0, None, raw)


def pack(pool: PagedRows, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    widths = section_bytes(pool.format)
    if any(width % 4 for width in widths):
        return reference.pack(pool, slots)
    raw = torch.empty(slots.shape[0], pool.row_bytes, dtype=torch.uint8, device=slots.device)
    return raw, _launch(raw, pool.pages, widths, pool.rows_per_page, pool.num_pages, slots, None)


def unpack(pool: PagedRows, slots: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    widths = section_bytes(pool.format)
    if any(width % 4 for width in widths):
        return reference.unpack(pool, slots, raw)
    raw = raw.contiguous()
    return _launch(raw, pool.pages, widths, pool.rows_per_page, pool.num_pages, slots, raw)


def _launch(
    raw: torch.Tensor,
    pages: torch.Tensor | None,
    widths: tuple[int, ...],
    rows_per_page: int,
    num_pages: int,
    slots: torch.Tensor | None,
    source: torch.Tensor | None,
) -> torch.Tensor:
    """source: `raw` where the segment is read; None = it is written from the pages. Returns: the checksum."""
    total = torch.full((1,), raw.numel(), dtype=torch.int64, device=raw.device)
    num_rows, row_bytes = raw.shape
    if num_rows == 0 or row_bytes == 0:
        return total
    page_bytes = pages.shape[1] if pages is not None else 0
    is_wide = all(size % reference.WORD_BYTES == 0 for size in (*widths, page_bytes))
    unit, dtype = (8, torch.int64) if is_wide else (4, torch.int32)
    words = triton.cdiv(row_bytes, reference.WORD_BYTES)
    has_tail = not is_wide and row_bytes % 8 == 4 and words - 1 == triton.next_power_of_2(words - 1)
    block = words - 1 if has_tail else triton.next_power_of_2(words)
    rows = max(1, _TILE_WORDS // block)
    _copy_kernel[(triton.cdiv(num_rows, rows),)](
        raw.view(dtype), pages.view(dtype) if pages is not None else None, slots, total, num_rows,
        num_pages * rows_per_page, page_bytes // unit, ROWS=rows, BLOCK=block, WORDS=words, UNITS=row_bytes // unit,
        DATA=widths[0] // unit, SCALES=sum(widths[1:]) // unit, PAGE_ROWS=rows_per_page, IS_WIDE=is_wide,
        HAS_TAIL=has_tail, READS_RAW=source is not None, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return total


@triton.jit
def _copy_kernel(
    raw, pages, slots, total, num_rows, num_slots, page_units,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, UNITS: tl.constexpr, DATA: tl.constexpr,
    SCALES: tl.constexpr, PAGE_ROWS: tl.constexpr, IS_WIDE: tl.constexpr, HAS_TAIL: tl.constexpr,
    READS_RAW: tl.constexpr,
):  # fmt: skip
    """Units are 8 bytes, or 4 where a row is no multiple of 8; words of the checksum are always 8.

    HAS_TAIL: BLOCK words and half a one make a row, as the scale of an index row; the half is taken apart.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    slot = tl.full((ROWS,), -1, tl.int64)
    if slots is not None:
        slot = tl.load(slots + rows, mask=is_row, other=-1).to(tl.int64)
    is_slot = (slot >= 0) & (slot < num_slots)
    if IS_WIDE:
        value = _copy_units(raw, pages, rows, slot, word, is_row, is_slot, page_units, UNITS, DATA, SCALES, PAGE_ROWS,
                            READS_RAW)  # fmt: skip
    else:
        # Halves of a word one beside the other: loads of every second unit would have a warp's lanes run over rows.
        unit = tl.arange(0, 2 * BLOCK)
        units = _copy_units(raw, pages, rows, slot, unit, is_row, is_slot, page_units, UNITS, DATA, SCALES, PAGE_ROWS,
                            READS_RAW)  # fmt: skip
        low, high = tl.split(units.reshape(ROWS, BLOCK, 2))
        value = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    key = (rows[:, None] * WORDS + word[None, :] + 1) * _GOLDEN
    term = tl.where(is_row[:, None] & (word < WORDS)[None, :], _mix64(value + key), 0)
    share = tl.sum(tl.sum(term, axis=1), axis=0)
    if HAS_TAIL:
        last = 2 * BLOCK + tl.arange(0, 1)
        tail = _copy_units(raw, pages, rows, slot, last, is_row, is_slot, page_units, UNITS, DATA, SCALES, PAGE_ROWS,
                           READS_RAW)  # fmt: skip
        word = tl.sum(tail.to(tl.int64) & 0xFFFFFFFF, axis=1)
        share += tl.sum(tl.where(is_row, _mix64(word + (rows * WORDS + WORDS) * _GOLDEN), 0), axis=0)
    tl.atomic_add(total, share, sem="relaxed")


@triton.jit
def _copy_units(
    raw, pages, rows, slot, unit, is_row, is_slot, page_units,
    UNITS: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr, PAGE_ROWS: tl.constexpr, READS_RAW: tl.constexpr,
):  # fmt: skip
    """Copy unit `unit` of every row; returns [ROWS, len(unit)], zero where there is none."""
    is_unit = is_row[:, None] & (unit < UNITS)[None, :]
    at_raw = raw + rows[:, None] * UNITS + unit[None, :]
    if pages is None:
        value = tl.load(at_raw, mask=is_unit, other=0)
    else:
        in_page = slot % PAGE_ROWS
        data = (in_page * DATA)[:, None] + unit[None, :]
        scale = PAGE_ROWS * DATA + (in_page * SCALES)[:, None] + (unit - DATA)[None, :]
        at_page = pages + (slot // PAGE_ROWS * page_units)[:, None] + tl.where((unit < DATA)[None, :], data, scale)
        if READS_RAW:
            value = tl.load(at_raw, mask=is_unit, other=0)
            tl.store(at_page, value, mask=is_unit & is_slot[:, None])
        else:
            value = tl.load(at_page, mask=is_unit & is_slot[:, None], other=0)
            tl.store(at_raw, value, mask=is_unit)
    return value


@triton.jit
def _mix64(x):
    """The splitmix64 finaliser on int64."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))
