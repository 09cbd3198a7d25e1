"""Gated pooling as the formula: a softmax over the slots of a block, per channel. Source: spec 4.4."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dsv4_kernels.indexer.reference import hadamard
from dsv4_kernels.rope.reference import norm_rope

if TYPE_CHECKING:
    from dsv4_kernels.compressor.step import CompressorBatch, CompressorPart


def pool_entries(kv: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor, overlap: bool) -> torch.Tensor:
    if not overlap:
        return _pool(kv[rows.clamp(min=0)], gate[rows.clamp(min=0)], rows)
    ratio, dim = rows.shape[1] // 2, kv.shape[1] // 2
    previous, own = rows[:, :ratio].clamp(min=0), rows[:, ratio:].clamp(min=0)
    # A token gives its first half to the next block and its second half to its own.
    values = torch.cat((kv[:, :dim][previous], kv[:, dim:][own]), dim=1)  # [E, 2 * ratio, dim]
    gates = torch.cat((gate[:, :dim][previous], gate[:, dim:][own]), dim=1)
    return _pool(values, gates, rows)


def _pool(values: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    gates = gates.masked_fill((rows < 0).unsqueeze(-1), float("-inf"))
    return (gates.softmax(dim=1) * values).sum(dim=1)


def compress(parts: "Sequence[CompressorPart]", batch: "CompressorBatch", ratio: int, eps: float) -> None:
    for part in parts:
        _compress(part, batch, ratio, eps)


def _compress(part: "CompressorPart", batch: "CompressorBatch", ratio: int, eps: float) -> None:
    dim, ring = part.norm_weight.shape[0], part.state.rows_per_page
    num_blocks = part.kv.shape[1] // dim
    positions, seqs = batch.positions, batch.token_to_seq
    gate = part.gate + part.ape[positions % ratio]
    row = torch.arange(positions.shape[0], device=positions.device)

    last = ((positions + 1) % ratio == 0) & (positions >= 0)
    ends = row[last]  # [E] rows that complete a block
    back = torch.arange(num_blocks * ratio - 1, -1, -1, device=positions.device)  # distance to the block's last token
    wanted = positions[ends, None] - back  # [E, num_blocks * ratio] positions
    start = positions[ends] - (ends - batch.cu_seqlens_q[seqs[ends]])  # first position of this step
    stored = batch.state_slots[seqs[ends], None] * ring + wanted % ring
    is_stored = (wanted >= 0) & (wanted < start[:, None])
    old_kv, old_gate = part.state.gather(torch.where(is_stored, stored, -1).flatten()).split(part.kv.shape[1], dim=1)
    number = torch.arange(stored.numel(), device=row.device).view(stored.shape) + positions.shape[0]
    rows = torch.where(is_stored, number, torch.where(wanted >= 0, ends[:, None] - back, -1))
    pooled = pool_entries(torch.cat((part.kv, old_kv)), torch.cat((gate, old_gate)), rows, num_blocks > 1)

    entries = norm_rope(pooled.to(part.entries.format.dtype), part.norm_weight, eps, batch.cis[ends])
    if part.is_rotated:
        entries = hadamard(entries)
    entry, per_page = positions[ends] // ratio, part.entries.rows_per_page
    column = entry // per_page
    page = batch.page_table[seqs[ends], column.clamp(max=batch.page_table.shape[1] - 1)]
    has_page = (page >= 0) & (column < batch.page_table.shape[1])
    part.entries.write(torch.where(has_page, page * per_page + entry % per_page, -1), entries)

    is_kept = (positions >= 0) & (batch.cu_seqlens_q[seqs + 1] - row <= ring)
    slots = batch.state_slots[seqs] * ring + positions % ring
    part.state.write(torch.where(is_kept, slots, -1), torch.cat((part.kv, gate), dim=1))
