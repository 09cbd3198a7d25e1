"""Index tensors of one step, computed once and shared by all layers.

Everything follows from absolute positions: which rows a query sees, which entries a chunk completes, which ring rows
they need. There is no "first chunk" case. Row numbers count the T tokens of the batch; slots count the rows of a pool.

Short chunks (decode, draft verification) write their window rows first and read everything through slots. Longer
chunks read [ring tail ++ fresh rows], because writing them first would overwrite ring rows that they still need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.forward_batch import ForwardBatch
from dsv4_kernels.rope import rotations

_MAX_PAGED_TOKENS = 8  # longest chunk that reads row by row; longer ones share their keys in one dense product
_COLUMN_ALIGN = 16  # of the column lists of block attention
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one sequence in this step."""

    seq: int  # index into the batch
    row: int  # first of its rows
    num_tokens: int
    start: int  # position of its first token

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step."""
        return self.start + self.num_tokens

    @property
    def rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.row, self.row + self.num_tokens)


@dataclass(frozen=True, slots=True)
class ShortChunks:
    """The rows of all short chunks."""

    spans: tuple[Span, ...]
    rows: torch.Tensor | None  # [R] int64, None = every row of the batch
    write_slots: torch.Tensor  # [R] int64


@dataclass(frozen=True, slots=True)
class Chunk:
    """One long chunk."""

    span: Span
    tail_slots: torch.Tensor  # [min(start, window - 1)] int64, ring rows right before the chunk
    write_slots: torch.Tensor  # [min(num_tokens, ring)] int64, for its last rows


@dataclass(frozen=True, slots=True)
class CompressPlan:
    """The entries that this step completes in layers of one ratio."""

    rows: torch.Tensor  # [E, c * ratio] int64 into [T fresh rows ++ stored rows], -1 = before the sequence
    stored_slots: torch.Tensor  # [N] int64, state ring rows of earlier steps
    entry_slots: torch.Tensor  # [E] int64, where the entries go
    cis: torch.Tensor  # [E, P] complex64, rotation at the first token of each block


class StepIndex:
    """Index tensors of `batch`. Building it copies two small tensors to the host; the layers copy none of these."""

    def __init__(
        self, batch: ForwardBatch, *, window: int, plain: torch.Tensor, compressed: torch.Tensor, window_ring: int
    ) -> None:
        bounds, ends = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
        self.batch = batch
        self.window = window
        self.spans = tuple(
            Span(seq, bounds[seq], bounds[seq + 1] - bounds[seq], end - (bounds[seq + 1] - bounds[seq]))
            for seq, end in enumerate(ends)
        )
        self._frequencies = {False: plain, True: compressed}
        self._window_ring = window_ring
        self._memo: dict[tuple[str, int, int], object] = {}
        longest = min(_MAX_PAGED_TOKENS, window_ring - window + 1)
        short = tuple(span for span in self.spans if span.num_tokens <= longest)
        self.paged = self._paged_rows(short) if short else None
        self.chunks = tuple(self._chunk(span) for span in self.spans if span.num_tokens > longest)

    def cis(self, ratio: int) -> torch.Tensor:
        """Rotations of the batch's positions for layers of a ratio: [T, P] complex64."""
        is_compressed = ratio > 0
        return self._once(
            "cis", is_compressed, 0, lambda: rotations(self.batch.positions, self._frequencies[is_compressed])
        )

    def num_visible(self, ratio: int) -> torch.Tensor:
        """Entries each row may see: w < (t + 1) // ratio. Returns: [T] int64."""
        return self._once(
            "visible", ratio, 0, lambda: torch.div(self.batch.positions + 1, ratio, rounding_mode="floor")
        )

    def block_positions(self, ratio: int) -> torch.Tensor:
        """Position of each row within its block: [T] int64."""
        return self._once("block", ratio, 0, lambda: self.batch.positions % ratio)

    def paged_entries(self, ratio: int, limit: int | None = None) -> torch.Tensor:
        """Entry ids of the paged rows, all visible ones up to `limit`: [R, K] int64, -1 = none."""
        assert self.paged is not None
        return self._once("entries", ratio, limit or 0, lambda: self._paged_entries(ratio, limit))

    def paged_entry_slots(self, ratio: int, entries_per_page: int, limit: int | None = None) -> torch.Tensor:
        """Slots of `paged_entries`."""
        ids = self.paged_entries(ratio, limit)
        return self._once("slots", ratio, limit or 0, lambda: self.paged_slots(ids, entries_per_page))

    def paged_slots(self, ids: torch.Tensor, entries_per_page: int) -> torch.Tensor:
        """Slots of entries of the paged rows. ids: [R, K] int64, -1 = none. Returns: the same shape."""
        assert self.paged is not None
        seqs = take(self.batch.token_to_seq, self.paged.rows).unsqueeze(1)
        return self._entry_slots(seqs, ids, entries_per_page)

    def span_entry_slots(self, span: Span, ratio: int, entries_per_page: int) -> torch.Tensor:
        """Slots of all entries that the last token of a span sees: [end // ratio] int64."""
        ids = torch.arange(span.end // ratio, device=self.batch.positions.device)
        return self._once(
            "span", ratio, span.seq, lambda: self._entry_slots(torch.full_like(ids, span.seq), ids, entries_per_page)
        )

    def window_writes(self) -> torch.Tensor:
        """Window slots of all rows; no sequence has more rows than the ring. Returns: [T] int64."""
        rows, slots = self._ring_writes(self.batch.window_slots, self._window_ring)
        assert rows is None, max(span.num_tokens for span in self.spans)
        return slots

    def paged_window_slots(self) -> torch.Tensor:
        """Window slots of the paged rows: [R, window] int64, -1 = before the sequence."""
        return self._once("window slots", 0, 0, self._paged_window_slots)

    def paged_window_columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Window of the paged rows in columns that start at a multiple of 16 positions.

        Returns: first position [R], slots [R, C] (-1 = not in the window), positions [R], all int64.
        """
        return self._once("columns", 0, 0, self._paged_window_columns)

    def chunk_window_columns(self, span: Span, block_tokens: int, num_tail: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for blocks of a long chunk, as rows of its keys [tail ++ fresh].

        Not kept for other layers: with a block per token it is one of the largest tensors of a step.
        Returns: first position [blocks], rows [blocks, C] (-1 = none).
        """
        starts = torch.arange(span.start, span.end, block_tokens, device=self.batch.positions.device)
        first = _aligned_first(starts, self.window)
        oldest = span.start - num_tail
        seen = first.unsqueeze(1) + self._arange(0, _num_columns(self.window + block_tokens - 1))
        last = (starts + block_tokens).clamp(max=span.end).unsqueeze(1)
        is_absent = (seen < oldest).logical_or_(seen >= last)
        return first, seen.sub_(oldest).masked_fill_(is_absent, -1)

    def state_writes(self, ring: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(rows, slots) of the last `ring` rows of every sequence; rows None = all."""
        return self._once("state", ring, 0, lambda: self._ring_writes(self.batch.state_slots, ring))

    def compress_plan(self, cache: LayerCache) -> CompressPlan | None:
        """What this step completes in a layer; None = no entry. All layers of one ratio share it."""
        return self._once("plan", cache.ratio, 0, lambda: self._compress_plan(cache))

    def _once(self, name: str, key: int, extra: int, build: Callable[[], Value]) -> Value:
        slot = (name, key, extra)
        if slot not in self._memo:
            self._memo[slot] = build()
        return self._memo[slot]  # type: ignore[return-value]

    def _paged_rows(self, spans: tuple[Span, ...]) -> ShortChunks:
        batch = self.batch
        rows = None
        if len(spans) < len(self.spans):
            rows = torch.cat([self._arange(span.row, span.row + span.num_tokens) for span in spans])
        positions = take(batch.positions, rows)  # [R]
        pages = batch.window_slots[take(batch.token_to_seq, rows)] * self._window_ring
        return ShortChunks(spans, rows, pages + positions % self._window_ring)

    def _paged_window_slots(self) -> torch.Tensor:
        assert self.paged is not None
        positions = take(self.batch.positions, self.paged.rows)  # [R]
        pages = self.batch.window_slots[take(self.batch.token_to_seq, self.paged.rows)] * self._window_ring
        seen = positions.unsqueeze(1) + self._arange(1 - self.window, 1)  # [R, window]
        return torch.where(seen >= 0, pages.unsqueeze(1) + seen % self._window_ring, -1)

    def _paged_window_columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.paged is not None
        positions = take(self.batch.positions, self.paged.rows)  # [R]
        pages = self.batch.window_slots[take(self.batch.token_to_seq, self.paged.rows)] * self._window_ring
        first = _aligned_first(positions, self.window)
        seen = first.unsqueeze(1) + self._arange(0, _num_columns(self.window))  # [R, C] positions
        last = positions.unsqueeze(1)
        is_visible = (seen <= last) & (seen > last - self.window)
        return first, torch.where(is_visible, pages.unsqueeze(1) + seen % self._window_ring, -1), positions

    def _chunk(self, span: Span) -> Chunk:
        ring = self._window_ring
        page = self.batch.window_slots[span.seq] * ring
        tail = self._arange(max(0, span.start - self.window + 1), span.start)
        kept = self._arange(max(span.start, span.end - ring), span.end)
        return Chunk(span, page + tail % ring, page + kept % ring)

    def _paged_entries(self, ratio: int, limit: int | None) -> torch.Tensor:
        assert self.paged is not None
        most = max(span.end for span in self.paged.spans) // ratio
        ids = self._arange(0, most if limit is None else min(most, limit))
        visible = take(self.num_visible(ratio), self.paged.rows)
        return torch.where(ids < visible.unsqueeze(1), ids, -1)

    def _entry_slots(self, seqs: torch.Tensor, ids: torch.Tensor, entries_per_page: int) -> torch.Tensor:
        """Through the page table; -1 stays -1. seqs and ids broadcast."""
        column = torch.div(ids.clamp(min=0), entries_per_page, rounding_mode="floor")
        slots = self.batch.page_table[seqs, column] * entries_per_page + ids % entries_per_page
        return torch.where(ids >= 0, slots, -1)

    def _ring_writes(self, pages: torch.Tensor, ring: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        batch = self.batch
        rows = None
        if any(span.num_tokens > ring for span in self.spans):
            rows = torch.cat(
                [self._arange(span.row + max(0, span.num_tokens - ring), span.rows.stop) for span in self.spans]
            )
        page = pages[take(batch.token_to_seq, rows)] * ring
        return rows, page + take(batch.positions, rows) % ring

    def _compress_plan(self, cache: LayerCache) -> CompressPlan | None:
        assert cache.state is not None and cache.compressed is not None, cache.ratio
        ratio, ring, entries_per_page = cache.ratio, cache.state.rows_per_page, cache.compressed.rows_per_page
        num_blocks = 2 if ratio == 4 else 1
        rows, stored, slots, firsts = [], [], [], []
        num_stored = 0
        for span in self.spans:
            ids = self._arange(span.start // ratio, span.end // ratio)  # [e]
            if ids.numel() == 0:
                continue
            first_block = (ids - (num_blocks - 1)) * ratio
            tokens = first_block.unsqueeze(1) + self._arange(0, num_blocks * ratio)  # [e, c * ratio] positions
            oldest = max(0, (span.start // ratio - (num_blocks - 1)) * ratio)
            fresh = tokens - span.start + span.row
            kept = tokens - oldest + self.batch.positions.shape[0] + num_stored
            rows.append(torch.where(tokens >= span.start, fresh, torch.where(tokens >= 0, kept, -1)))
            page = self.batch.state_slots[span.seq] * ring
            stored.append(page + self._arange(oldest, span.start) % ring)
            num_stored += span.start - oldest
            slots.append(self._entry_slots(torch.full_like(ids, span.seq), ids, entries_per_page))
            firsts.append(ids * ratio)
        if not rows:
            return None
        cis = rotations(torch.cat(firsts), self._frequencies[True])
        return CompressPlan(torch.cat(rows), torch.cat(stored), torch.cat(slots), cis)

    def _arange(self, first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last, device=self.batch.positions.device)


def _aligned_first(positions: torch.Tensor, window: int) -> torch.Tensor:
    """First position of the window at each position, rounded down to a multiple of 16."""
    return (positions - window + 1).clamp(min=0) & ~(_COLUMN_ALIGN - 1)


def _num_columns(num_positions: int) -> int:
    """Columns that hold any `num_positions` successive positions from an aligned one on."""
    return -(-(num_positions + _COLUMN_ALIGN - 1) // _COLUMN_ALIGN) * _COLUMN_ALIGN


def take(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Rows of x, or x itself. rows: [R] int64, None = all."""
    return x if rows is None else x.index_select(0, rows)
