"""The block-scaled FP8 product in Triton: a streaming kernel for few rows, a tile kernel for many."""

from dataclasses import dataclass

import torch
import triton

from dsv4_kernels.gemm.fp8.op import BLOCK, Fp8Weight
from dsv4_kernels.gemm.fp8.triton_kernels import stream_kernel, tile_kernel
from dsv4_kernels.triton_pdl import uses_ptx

MAX_STREAM_ROWS = 64
_STREAM_TILE = 64  # weight rows of a program: one warpgroup
_WANTED_PROGRAMS = 3 * 132  # three on every multiprocessor of an H200
_MIN_BLOCKS = 2  # of 128 columns that one part of a split sum has


@dataclass(frozen=True, slots=True)
class Config:
    """Tile and launch options of the tile kernel."""

    tile_tokens: int = 128
    tile_rows: int = 128
    halves: int = 1  # of tile_rows each
    num_warps: int = 8
    num_stages: int = 4
    stream_stages: int = 0  # 0: by the number of tokens


def fp8_linear(
    values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, out_dtype: torch.dtype, config: Config | None = None
) -> torch.Tensor:
    values, scales = values.contiguous(), scales.contiguous()
    out = torch.empty(values.shape[0], weight.values.shape[0], dtype=out_dtype, device=values.device)
    if values.shape[0] == 0:
        return out
    launch = _stream if values.shape[0] <= MAX_STREAM_ROWS else _tiles
    launch(values, scales, weight, out, config or config_for(weight))
    return out


def config_for(weight: Fp8Weight) -> Config:
    """Launch options for a weight; a function of its shapes."""
    return Config() if weight.num_groups > 1 else Config(tile_rows=64, halves=2, num_warps=4, num_stages=3)


def num_parts(weight: Fp8Weight) -> int:
    """Parts of a split sum: enough programs to fill the chip. A function of the weight only, never of the rows."""
    num_blocks = weight.values.shape[1] // BLOCK
    wanted = triton.cdiv(_WANTED_PROGRAMS, weight.values.shape[0] // _STREAM_TILE)
    per_part = max(_MIN_BLOCKS, triton.cdiv(num_blocks, wanted))
    return int(triton.cdiv(num_blocks, per_part))


def _stream(values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, config: Config) -> None:
    num_rows, num_columns = weight.values.shape
    num_tiles, parts = num_rows // _STREAM_TILE, num_parts(weight)
    tokens = max(16, triton.next_power_of_2(values.shape[0]))
    # Of 16 tokens five stages leave room for four programs, of 32 four stages do: measured fastest at 33 MB.
    stages = config.stream_stages or (5 if tokens <= 16 else 4)
    partial = torch.empty(parts if parts > 1 else 0, num_tiles, _STREAM_TILE, tokens, device=values.device)
    stream_kernel[(num_tiles, parts)](
        values, scales, weight.values, weight.scales, out, partial, weight.arrivals, values.shape[0],
        num_columns=num_columns, rows_per_group=weight.rows_per_group, num_groups=weight.num_groups, rows=_STREAM_TILE,
        tokens=tokens, parts=parts, use_ptx=uses_ptx(values),
        launch_pdl=uses_ptx(values), num_warps=4, num_stages=stages,
    )  # fmt: skip


def _tiles(values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, config: Config) -> None:
    num_rows, num_columns = weight.values.shape
    halves = config.halves if weight.rows_per_group % (config.halves * config.tile_rows) == 0 else 1
    grid = (triton.cdiv(values.shape[0], config.tile_tokens) * (num_rows // (config.tile_rows * halves)),)
    tile_kernel[grid](
        values, scales, weight.values, weight.scales, out, values.shape[0], num_columns=num_columns,
        rows_per_group=weight.rows_per_group, num_groups=weight.num_groups, tokens=config.tile_tokens,
        rows=config.tile_rows, halves=halves, use_ptx=uses_ptx(values), launch_pdl=uses_ptx(values),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
