"""Attention of every layer kind: one shared latent, window, entries, sink, counter-rotation. Source: spec 4.3."""

from collections.abc import Mapping

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.block_lists import attend_chunk, attend_rows, pad_columns
from dsv4_cluster.model.compressor import Compressor
from dsv4_cluster.model.indexer import Indexer
from dsv4_cluster.model.linear import GroupedLinear, Linear, RowParallelLinear, local_size
from dsv4_cluster.model.norm import RMSNorm
from dsv4_cluster.model.step_index import Chunk, StepIndex
from dsv4_cluster.parallel.state import ParallelState
from dsv4_kernels.attention import masked_attention, paged_attention
from dsv4_kernels.dispatch import choose
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.quant import fake_quant_kv
from dsv4_kernels.rope import apply_rope_, norm_rope_

_TILE_ROWS = 128  # queries of a long chunk per product
_TILE_VALUES = 1 << 22  # fp32 logits held at once: 16 MiB


class Attention(nn.Module):
    """Heads and output groups are split over the tp axis in whole groups; the latent is on every rank."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        parallel: ParallelState,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str,
        indexer_dtype: str,
    ) -> None:
        super().__init__()
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads_per_group = config.num_attention_heads // config.o_groups
        self._num_heads = local_size(config.num_attention_heads, heads_per_group, parallel)
        num_groups = self._num_heads // heads_per_group
        self.wq_a = Linear(hidden, config.q_lora_rank, dtype=dtype, device=device)
        self.q_norm = RMSNorm(config.q_lora_rank, eps, device=device)
        self.wq_b = Linear(config.q_lora_rank, self._num_heads * dim, dtype=dtype, device=device)
        self.wkv = Linear(hidden, dim, dtype=dtype, device=device)
        self.kv_norm = RMSNorm(dim, eps, device=device)
        self.wo_a = GroupedLinear(heads_per_group * dim, config.o_lora_rank, num_groups, dtype=dtype, device=device)
        self.wo_b = RowParallelLinear(
            config.o_groups * config.o_lora_rank, hidden, parallel, unit=config.o_lora_rank, dtype=dtype, device=device
        )
        sink = torch.empty(self._num_heads, dtype=torch.float32, device=device)
        self.attn_sink = nn.Parameter(sink, requires_grad=False)
        self._ratio = config.compress_ratio(layer_id)
        self.compressor = Compressor(config, self._ratio, dim, dtype=dtype, device=device) if self._ratio else None
        self.indexer: Indexer | None = None
        if self._ratio == 4:
            self.indexer = Indexer(config, dtype=dtype, device=device, indexer_dtype=indexer_dtype)
        self._is_fp8 = kv_cache_dtype == "fp8"
        self._config = config
        self._scale = dim**-0.5
        self._uses_lists = choose("attention", device, dtype) == "native"

    def forward(self, x: torch.Tensor, index: StepIndex, cache: LayerCache) -> torch.Tensor:
        """x: [T, D], normed. Mutates the layer's pools: entries before they are read, ring rows at the end.

        Returns: [T, D].
        """
        cis = index.cis(self._ratio)
        qr = self.q_norm(self.wq_a(x))
        kv = norm_rope_(self.wkv(x), self.kv_norm.weight, self._config.rms_norm_eps, cis)  # [T, dim]
        selected: Mapping[int, torch.Tensor] = {}
        if self.compressor is not None:
            assert cache.state is not None and cache.compressed is not None, self._ratio
            # Entries first: the token that completes a block already sees its entry.
            self.compressor(x, index, index.compress_plan(cache), cache.state, cache.compressed)
        if self.indexer is not None:
            selected = self.indexer(x, qr, index, cache)
        out = self._attend(self._queries(qr, cis), kv, index, cache, selected)
        out = apply_rope_(out, cis, inverse=True)  # makes the rotary part a function of relative positions
        return self.wo_b(self.wo_a(out.flatten(1)))  # type: ignore[no-any-return]

    def _queries(self, qr: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        """Made last and held by nobody else: the widest tensor of a layer. Returns: [T, H, dim]."""
        q = self.wq_b(qr).view(qr.shape[0], self._num_heads, -1)
        return norm_rope_(q, None, self._config.rms_norm_eps, cis)

    def store_window(self, x: torch.Tensor, index: StepIndex, cache: LayerCache) -> None:
        """Only write the window rows. x: [T, D], normed; at most a ring of rows per sequence."""
        kv = norm_rope_(self.wkv(x), self.kv_norm.weight, self._config.rms_norm_eps, index.cis(self._ratio))
        cache.window.write(index.window_writes(), kv)

    def _attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        index: StepIndex,
        cache: LayerCache,
        selected: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:
        if not index.chunks:
            return self._attend_paged(q, kv, index, cache, selected)
        if self._is_fp8:
            fresh = fake_quant_kv(kv, self._config.qk_rope_head_dim)  # as the ring rows read back: prefill = decode
        else:
            fresh = kv
        if index.paged is None and len(index.chunks) == 1:
            return self._attend_long(q, fresh, index, cache, index.chunks[0], selected)
        out = torch.empty_like(q)
        if index.paged is not None and index.paged.rows is not None:
            short = index.paged.rows
            out[short] = self._attend_paged(q[short], kv[short], index, cache, selected)
        for chunk in index.chunks:
            rows = chunk.span.rows
            out[rows] = self._attend_long(q[rows], fresh[rows], index, cache, chunk, selected)
        return out

    def _attend_long(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        index: StepIndex,
        cache: LayerCache,
        chunk: Chunk,
        selected: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:
        """A long chunk: read the window rows before it, then write its last ones. q, kv: its own rows."""
        keys = torch.cat((cache.window.gather(chunk.tail_slots), kv))  # [tail + n, dim]
        out = self._attend_chunk(q, keys, index, cache, chunk, selected.get(chunk.span.seq))
        cache.window.write(chunk.write_slots, keys[keys.shape[0] - chunk.write_slots.shape[0] :])
        return out

    def _attend_paged(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        index: StepIndex,
        cache: LayerCache,
        selected: Mapping[int, torch.Tensor],
    ) -> torch.Tensor:
        """Short chunks: write the window rows, then read everything through slots."""
        assert index.paged is not None
        cache.window.write(index.paged.write_slots, kv)
        if self._uses_lists:
            entries = None
            if cache.compressed is not None:
                entries = pad_columns(self._paged_entry_slots(index, cache.compressed.rows_per_page, selected))
            is_selected = any(span.seq in selected for span in index.paged.spans)
            return attend_rows(
                q, index, cache, entries, is_selected=is_selected, sink=self.attn_sink, scale=self._scale
            )
        pools, slots = [cache.window], [index.paged_window_slots()]
        if cache.compressed is not None:
            pools.append(cache.compressed)
            slots.append(self._paged_entry_slots(index, cache.compressed.rows_per_page, selected))
        return paged_attention(q, pools, slots, sink=self.attn_sink, scale=self._scale)

    def _paged_entry_slots(
        self, index: StepIndex, entries_per_page: int, selected: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Slots [R, K] of the selected entries, or of all visible ones where nothing had to be selected."""
        assert index.paged is not None
        limit = None if self.indexer is None else self.indexer.topk
        if not any(span.seq in selected for span in index.paged.spans):
            return index.paged_entry_slots(self._ratio, entries_per_page, limit)
        ids = index.paged_entries(self._ratio, limit).clone()  # [R, topk]
        row = 0
        for span in index.paged.spans:
            if span.seq in selected:
                ids[row : row + span.num_tokens] = selected[span.seq]
            row += span.num_tokens
        return index.paged_slots(ids, entries_per_page)

    def _attend_chunk(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        index: StepIndex,
        cache: LayerCache,
        chunk: Chunk,
        selected: torch.Tensor | None,
    ) -> torch.Tensor:
        """A long chunk: tiles of queries against the window rows they span and all entries, with masks."""
        if self._uses_lists:
            return attend_chunk(q, keys, index, cache, chunk, selected, sink=self.attn_sink, scale=self._scale)
        span, window = chunk.span, index.window
        num_tail = keys.shape[0] - span.num_tokens
        entries = None
        if cache.compressed is not None:
            slots = index.span_entry_slots(span, self._ratio, cache.compressed.rows_per_page)  # [end // ratio]
            entries = _Entries(cache.compressed, slots, index.num_visible(self._ratio)[span.rows], selected)
        tile = _tile_rows(self._num_heads, q.shape[2], window, entries)
        out = torch.empty_like(q)
        for first in range(0, span.num_tokens, tile):
            last = min(first + tile, span.num_tokens)
            oldest = max(0, num_tail + first - window + 1)
            row = torch.arange(num_tail + first, num_tail + last, device=q.device).unsqueeze(1)
            column = torch.arange(oldest, num_tail + last, device=q.device)
            rows, masks = [keys[oldest : num_tail + last]], [(column <= row) & (column > row - window)]
            if entries is not None:
                entry_rows, mask = entries.of(slice(first, last))
                rows.append(entry_rows)
                masks.append(mask)
            out[first:last] = masked_attention(q[first:last], rows, masks, sink=self.attn_sink, scale=self._scale)
        return out


class _Entries:
    """The entries that the queries of a long chunk attend to: all visible ones, or the picks of each query."""

    def __init__(
        self, pool: PagedRows, slots: torch.Tensor, num_visible: torch.Tensor, selected: torch.Tensor | None
    ) -> None:
        """slots: [N] of all entries. num_visible: [n]. selected: [n, topk] entry ids, -1 = none. All int64."""
        self._pool, self._slots, self._num_visible, self._selected = pool, slots, num_visible, selected
        self._rows = pool.gather(slots) if selected is None else None  # [N, dim]

    @property
    def num_columns(self) -> int:
        """Most entries of one query."""
        return self._slots.shape[0] if self._selected is None else self._selected.shape[1]

    @property
    def is_selected(self) -> bool:
        """True when every query has rows of its own."""
        return self._selected is not None

    def of(self, queries: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [N, dim] or, for picks, [n, topk, dim], and their mask [n, N or topk]."""
        if self._rows is not None:
            visible = self._num_visible[queries]
            num_entries = int(visible[-1])
            column = torch.arange(num_entries, device=visible.device)
            return self._rows[:num_entries], column < visible.unsqueeze(1)
        assert self._selected is not None
        picks = self._selected[queries]
        return self._pool.gather(torch.where(picks >= 0, self._slots[picks.clamp(min=0)], -1)), picks >= 0


def _tile_rows(num_heads: int, dim: int, window: int, entries: _Entries | None) -> int:
    """Queries per product, so that logits and picked rows stay within their budget."""
    num_columns = 0 if entries is None else entries.num_columns
    widest = num_heads * (window + _TILE_ROWS + num_columns)
    if entries is not None and entries.is_selected:
        widest = max(widest, num_columns * dim)
    return max(1, min(_TILE_ROWS, _TILE_VALUES // widest))
