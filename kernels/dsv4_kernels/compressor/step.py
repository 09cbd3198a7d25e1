"""Public op of a compressor's whole step: state, pooling, norm, rotation, rounding, insertion. Source: spec 4.4."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.kv.rows import PagedRows

_OVERLAP_RATIO = 4
_MAX_PARTS = 2  # main and indexer


@dataclass(frozen=True, slots=True)
class CompressorPart:
    """One compressor of a layer; c = 2 channel sets at ratio 4, otherwise 1."""

    kv: torch.Tensor  # [T, c * dim] fp32, rows may be strided
    gate: torch.Tensor  # [T, c * dim] fp32, without position bias
    ape: torch.Tensor  # [ratio, c * dim] fp32
    norm_weight: torch.Tensor  # [dim] fp32
    state: PagedRows  # rings of plain fp32 rows: kv, then gate with its bias; mutated
    entries: PagedRows  # pool of finished entries; mutated
    is_rotated: bool = False  # Hadamard transform of finished entries


@dataclass(frozen=True, slots=True)
class CompressorBatch:
    """What all layers of one ratio share in a step."""

    positions: torch.Tensor  # [T] int64, consecutive within a sequence; a negative row is padding
    token_to_seq: torch.Tensor  # [T] int64
    cu_seqlens_q: torch.Tensor  # [B + 1] int64, rows of each sequence
    state_slots: torch.Tensor  # [B] int64, page of the state rings
    page_table: torch.Tensor  # [B, P] int64, pages of the entries, -1 = none
    cis: torch.Tensor  # [T, pairs] complex64, rotation at position - ratio + 1; read in rows that complete a block
    max_seqlen_q: int


def compress(
    parts: Sequence[CompressorPart], batch: CompressorBatch, *, ratio: int, eps: float, impl: str = AUTO
) -> None:
    """Write the entries that this step completes, then the state rows that later steps need.

    parts: one or two compressors of a layer, in one launch. ratio: tokens per entry; at 4 blocks overlap.
    Mutates state and entries of every part. State rows are found by position, so a step that is computed again, with
    other tokens or fewer, needs no undoing. An entry without a page, and a row that is padding, writes nothing.
    Entries are rounded to the dtype of their pool's format between pooling, norm and rotation, as the model rounds.
    Batch-invariant: an entry's bits do not depend on other rows, nor on how its tokens were divided into steps.
    Raises: ValueError when shapes do not fit, or a ring cannot hold the rows that a block needs.
    """
    if not 1 <= len(parts) <= _MAX_PARTS:
        raise ValueError(f"{len(parts)} compressors, expected 1 or {_MAX_PARTS}")
    for part in parts:
        _check(part, batch, ratio)
    implementation("compressor", parts[0].kv.device, parts[0].kv.dtype, impl).compress(parts, batch, ratio, eps)


def num_sets(ratio: int) -> int:
    """Channel sets of a token, and blocks that an entry pools."""
    return 2 if ratio == _OVERLAP_RATIO else 1


def _check(part: CompressorPart, batch: CompressorBatch, ratio: int) -> None:
    channels = num_sets(ratio) * part.norm_weight.shape[0]
    rows = (batch.positions.shape[0], channels)
    if tuple(part.kv.shape) != rows or tuple(part.gate.shape) != rows or tuple(part.ape.shape) != (ratio, channels):
        raise ValueError(
            f"kv {tuple(part.kv.shape)}, gate {tuple(part.gate.shape)} and ape {tuple(part.ape.shape)} "
            f"do not fit {rows} at ratio {ratio}"
        )
    fmt = part.state.format
    if fmt.kind != "plain" or fmt.dtype != torch.float32 or fmt.dim != 2 * channels:
        raise ValueError(f"state rows are {fmt}, expected plain fp32 rows of {2 * channels} values")
    if part.state.rows_per_page < num_sets(ratio) * ratio:
        raise ValueError(f"a ring of {part.state.rows_per_page} rows is shorter than {num_sets(ratio) * ratio}")
