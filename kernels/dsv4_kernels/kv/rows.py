"""Paged cache rows in every precision the cache knows: one container, one write, one gather.

A pool is `num_pages` pages of `rows_per_page` rows; a row is one vector of `dim` values. A flat slot is
`page * rows_per_page + row`. All pools of the engine (window rings, compressed entries, indexer keys, compressor
states) are instances that differ only in their `RowFormat`. Source: spec 6.1.

A row consists of sections (data, then scales where the format has them). A page holds the data sections of all its rows
back to back, then their scale sections; the page stride is padded up to a multiple of the data section. Every section
of the whole pool is therefore one dense two-dimensional view, and a row of it is found by one multiplication.
"""

from dataclasses import dataclass
from typing import Self

import torch

from dsv4_kernels.kv.row_codec import decode_rows, encode_rows, section_bytes
from dsv4_kernels.kv.row_format import RowFormat, RowKind
from dsv4_kernels.native import ops
from dsv4_kernels.native.library import load

__all__ = ["PagedRows", "RowFormat", "RowKind"]


@dataclass(frozen=True, slots=True)
class _Section:
    """One section of every row of a pool, as a dense view of the pool's bytes."""

    units: torch.Tensor  # [num_pages * page_stride / width, width / itemsize], the widest integer that divides `width`
    width: int  # bytes per row
    page_stride: int  # rows of `units` from one page to the next
    first: int  # row of `units` where page 0's section starts


class PagedRows:
    """A pool of rows. Holds bytes, no policy: who owns which page is decided elsewhere."""

    __slots__ = ("_sections", "format", "num_pages", "pages", "row_bytes", "rows_per_page")

    format: RowFormat
    num_pages: int
    rows_per_page: int
    row_bytes: int  # payload of one row, page padding excluded
    pages: torch.Tensor  # [num_pages, page_bytes] uint8, the memory itself

    def __init__(self, fmt: RowFormat, pages: torch.Tensor, rows_per_page: int) -> None:
        widths = section_bytes(fmt)
        assert pages.dtype == torch.uint8 and pages.is_contiguous(), (pages.dtype, pages.stride())
        assert pages.shape[1] == page_bytes(fmt, rows_per_page), (pages.shape, fmt, rows_per_page)
        self.format = fmt
        self.num_pages = pages.shape[0]
        self.rows_per_page = rows_per_page
        self.row_bytes = sum(widths)
        self.pages = pages
        self._sections = _dense_sections(pages, widths, rows_per_page)

    @classmethod
    def allocate(cls, fmt: RowFormat, num_pages: int, rows_per_page: int, device: torch.device | str) -> Self:
        """A zero-filled pool."""
        shape = (num_pages, page_bytes(fmt, rows_per_page))
        return cls(fmt, torch.zeros(shape, dtype=torch.uint8, device=device), rows_per_page)

    @property
    def num_bytes(self) -> int:
        """Size of the pool's memory, page padding included."""
        return self.pages.numel()

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows, rounded to the format.

        slots: [N] int64, distinct; a negative one writes nothing. rows: [N, dim] of any float dtype.
        Raises: IndexError on CPU when a slot is out of range.
        """
        self._store(slots, encode_rows(self.format, rows))

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Read rows back in `format.dtype`; a negative slot yields a zero row whatever the pool holds.

        slots: int64 of any shape. Returns: [*slots.shape, dim], equal bitwise to `round_rows` of what was written.
        Raises: IndexError on CPU when a slot is out of range.
        """
        flat = slots.reshape(-1)
        rows = decode_rows(self.format, self._load(flat.clamp(min=0)))  # [N, dim]
        negative = flat < 0
        # The branch saves a pass over the rows; on a device it would cost a synchronisation instead.
        if flat.device.type != "cpu" or bool(negative.any()):
            rows.masked_fill_(negative[:, None], 0.0)
        return rows.view(*slots.shape, self.format.dim)

    def addressable(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for a kernel that follows row numbers itself. slots: int64 of any shape, negative = none.

        Returns: rows [N, dim] of `format.dtype` and the row number of every slot, -1 = none. A plain pool lends its own
        memory, others their dequantised rows.
        """
        if self.format.kind == "plain":
            return self.pages.view(self.format.dtype).view(-1, self.format.dim), slots
        rows = self.gather(slots).view(-1, self.format.dim)
        numbers = torch.arange(rows.shape[0], device=slots.device).view(slots.shape)
        return rows, torch.where(slots >= 0, numbers, -1)

    def read_raw(self, slots: torch.Tensor) -> torch.Tensor:
        """Payload bytes of rows, data then scales, independent of the page geometry.

        slots: [N] int64, none negative. Returns: [N, row_bytes] uint8.
        """
        sections = self._load(slots)
        return sections[0] if len(sections) == 1 else torch.cat(sections, dim=1)

    def write_raw(self, slots: torch.Tensor, raw: torch.Tensor) -> None:
        """Store payload bytes as `read_raw` returned them. slots: [N] int64, distinct; raw: [N, row_bytes] uint8."""
        assert raw.shape == (slots.shape[0], self.row_bytes), (raw.shape, slots.shape, self.row_bytes)
        self._store(slots, raw.split([section.width for section in self._sections], dim=1))

    def _load(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        page = slots.div(self.rows_per_page, rounding_mode="floor")
        row = slots - page * self.rows_per_page
        return tuple(
            s.units.index_select(0, page * s.page_stride + s.first + row).view(torch.uint8) for s in self._sections
        )

    def _store(self, slots: torch.Tensor, sections: tuple[torch.Tensor, ...]) -> None:
        if len(sections) == 1 and slots.device.type == "cpu" and load() is not None:
            ops.store_rows(self.pages, slots, sections[0])  # pages of one section are an array of rows
            return
        keep = slots >= 0
        if not bool(keep.all()):
            slots = slots[keep]
            sections = tuple(data[keep] for data in sections)
        page = slots.div(self.rows_per_page, rounding_mode="floor")
        row = slots - page * self.rows_per_page
        for section, data in zip(self._sections, sections, strict=True):
            index = page * section.page_stride + section.first + row
            section.units.index_put_((index,), _as_units(data, section.units.dtype))


def round_rows(fmt: RowFormat, rows: torch.Tensor) -> torch.Tensor:
    """What the cache would return for rows that are not stored yet, bitwise: prefill and decode see the same numbers.

    rows: [N, dim] of any float dtype. Returns: [N, dim] of `fmt.dtype`.
    """
    return decode_rows(fmt, encode_rows(fmt, rows))


def page_bytes(fmt: RowFormat, rows_per_page: int) -> int:
    """Bytes from one page to the next. Source: spec 6.1 (64 rows of head_dim 512 in fp8: 37,440; 2 rows: 1,728)."""
    widths = section_bytes(fmt)
    return -(-rows_per_page * sum(widths) // widths[0]) * widths[0]


def _dense_sections(pages: torch.Tensor, widths: tuple[int, ...], rows_per_page: int) -> tuple[_Section, ...]:
    sections = []
    offset = 0
    for width in widths:
        stride = pages.shape[1]
        assert offset % width == 0 and stride % width == 0, f"section of {width} bytes at {offset} in pages of {stride}"
        units = pages.view(-1, width).view(_unit_dtype(width))
        sections.append(_Section(units, width, stride // width, offset // width))
        offset += width * rows_per_page
    return tuple(sections)


def _unit_dtype(width: int) -> torch.dtype:
    """Rows are copied as the widest integers that fit: fewer elements than bytes, and any bit pattern survives."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if width % dtype.itemsize == 0:
            return dtype
    return torch.uint8


def _as_units(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes [N, width] as integers; copies only when the memory is not dense or not aligned."""
    if data.stride() != (data.shape[1], 1) or data.storage_offset() % dtype.itemsize:
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype)
