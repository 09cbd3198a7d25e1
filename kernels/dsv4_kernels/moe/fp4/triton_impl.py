"""MXFP4 experts in Triton: four launches, sizes from shapes, everything else read on the device."""

from dataclasses import dataclass

import torch
import triton

from dsv4_kernels.moe.fp4.layout import BLOCK_K, Fp4Experts, PackedFp4
from dsv4_kernels.moe.fp4.triton_kernels import down_kernel, gate_up_kernel, gather_kernel, sum_slots_kernel
from dsv4_kernels.moe.work_list import WorkList
from dsv4_kernels.triton_pdl import uses_ptx

_SUM_BLOCK = 1024
_GATHER_BLOCKS = 4  # blocks of 128 columns per program


@dataclass(frozen=True, slots=True)
class Config:
    """Options of the two products."""

    gate_up_warps: int = 4
    gate_up_stages: int = 3
    down_warps: int = 4
    down_stages: int = 4
    down_halves: int = 1  # tiles of 128 output columns per program
    gate_up_is_split: bool = False  # products of 64 weight rows instead of 128: half the registers of a product


@dataclass(frozen=True, slots=True)
class TiledRows:
    """FP8 rows in the order of a work list."""

    values: torch.Tensor  # [P + rows_per_tile - 1, K] e4m3
    scale_tiles: torch.Tensor  # [max_tiles, K / 128, rows_per_tile] int32, UE8M0 << 23: the bits of an fp32


def config_for(work: WorkList) -> Config:
    """Launch options for a work list; a function of its shapes."""
    return Config(4, 3, 4, 3, gate_up_is_split=True) if work.rows_per_tile > 32 else Config()


def fp4_experts(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Fp4Experts,
    first_expert: int,
    shared: torch.Tensor | None,
    work: WorkList,
    out_dtype: torch.dtype,
    config: Config | None = None,
) -> torch.Tensor:
    num_tokens, hidden_size = values.shape
    out = torch.empty(num_tokens, hidden_size, dtype=out_dtype, device=values.device)
    if not out.numel():
        return out
    config = config or config_for(work)
    x = gather(values, scales, work)
    hidden = gate_up(x, topk_weights.contiguous(), experts.w13, experts.limit, work, config)
    rows = down(hidden, experts.w2, work, config)
    grid = (num_tokens, triton.cdiv(hidden_size, _SUM_BLOCK))
    sum_slots_kernel[grid](
        rows, topk_ids.contiguous(), None if shared is None else shared.contiguous(), out, first_expert,
        experts.num_experts, topk=work.topk, dim=hidden_size, block=_SUM_BLOCK, num_warps=4,
        use_ptx=uses_ptx(values), launch_pdl=uses_ptx(values),
    )  # fmt: skip
    return out


def gather(values: torch.Tensor, scales: torch.Tensor | None, work: WorkList) -> TiledRows:
    """Rows of the routed pairs in the order of the work list, quantised here when `scales` is None."""
    dim = values.shape[1]
    rows = _allocate_rows(work, dim, values.device)
    grid = (work.tile_expert.shape[0], triton.cdiv(dim // BLOCK_K, _GATHER_BLOCKS))
    gather_kernel[grid](
        values.contiguous(), None if scales is None else scales.contiguous(), work.pairs, work.tile_expert,
        work.tile_first, work.tile_rows, rows.values, rows.scale_tiles, work.topk, num_columns=dim,
        tokens=work.rows_per_tile, blocks=_GATHER_BLOCKS, num_warps=4, use_ptx=uses_ptx(values),
        launch_pdl=uses_ptx(values),
    )  # fmt: skip
    return rows


def gate_up(
    x: TiledRows, weights: torch.Tensor, w13: PackedFp4, limit: float, work: WorkList, config: Config
) -> TiledRows:
    """Weighted SwiGLU rows in the order of the work list."""
    num_tiles = w13.words.shape[1]
    hidden = _allocate_rows(work, num_tiles * BLOCK_K, weights.device)
    gate_up_kernel[(num_tiles, work.tile_expert.shape[0])](
        x.values, x.scale_tiles, w13.words, w13.exponents, w13.block_exponent, work.pairs, work.tile_expert,
        work.tile_first, work.tile_rows, weights, hidden.values, hidden.scale_tiles, limit,
        num_columns=w13.num_columns, num_tiles=num_tiles, tokens=work.rows_per_tile, is_folded=w13.is_folded,
        is_split=config.gate_up_is_split, use_ptx=uses_ptx(weights), launch_pdl=uses_ptx(weights),
        num_warps=config.gate_up_warps, num_stages=config.gate_up_stages,
    )  # fmt: skip
    return hidden


def down(hidden: TiledRows, w2: PackedFp4, work: WorkList, config: Config) -> torch.Tensor:
    """Rows of the routed pairs. Returns: [P, D] bf16 in the order of the pairs; others are not written."""
    num_tiles = w2.words.shape[1]
    halves = config.down_halves if num_tiles % config.down_halves == 0 else 1
    rows = torch.empty(work.pairs.shape[0], w2.num_rows, dtype=torch.bfloat16, device=hidden.values.device)
    down_kernel[(num_tiles // halves, work.tile_expert.shape[0])](
        hidden.values, hidden.scale_tiles, w2.words, w2.exponents, w2.block_exponent, work.pairs, work.tile_expert,
        work.tile_first, work.tile_rows, rows, num_columns=w2.num_columns, num_tiles=num_tiles,
        tokens=work.rows_per_tile, halves=halves, is_folded=w2.is_folded,
        use_ptx=uses_ptx(rows), launch_pdl=uses_ptx(rows), num_warps=config.down_warps, num_stages=config.down_stages,
    )  # fmt: skip
    return rows


def _allocate_rows(work: WorkList, dim: int, device: torch.device) -> TiledRows:
    """A whole tile can be read from any first row, so there are that many rows behind the last."""
    num_rows = work.pairs.shape[0] + work.rows_per_tile - 1
    values = torch.empty(num_rows, dim, dtype=torch.float8_e4m3fn, device=device)
    shape = (work.tile_expert.shape[0], dim // BLOCK_K, work.rows_per_tile)
    return TiledRows(values, torch.empty(shape, dtype=torch.int32, device=device))
