"""Public op of the block-scaled FP8 product. Source: spec 2.2."""

from dataclasses import dataclass

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.quant import Fp8Rows, decode_ue8m0, quantise_fp8

BLOCK = 128  # rows and columns per weight scale, columns per activation scale


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """G matrices of N rows and K columns, one below the other."""

    values: torch.Tensor  # [G * N, K] float8_e4m3fn
    scales: torch.Tensor  # [G * N / 128, K / 128] fp32
    num_groups: int
    arrivals: torch.Tensor  # [G * N / 64] int32, zero between calls: which parts of a split sum are there

    @property
    def rows_per_group(self) -> int:
        return self.values.shape[0] // self.num_groups


def make_fp8_weight(values: torch.Tensor, scales: torch.Tensor, *, num_groups: int = 1) -> Fp8Weight:
    """values: [G * N, K] float8_e4m3fn. scales: [G * N / 128, K / 128] uint8 or float8_e8m0fnu bytes, or fp32.

    Nothing is copied but the scales. Raises: ValueError when N or K is not a multiple of 128 or shapes disagree.
    """
    num_rows, num_columns = values.shape
    if num_rows % (BLOCK * num_groups) or num_columns % BLOCK:
        raise ValueError(f"weight {num_rows} x {num_columns} in {num_groups} groups, blocks are {BLOCK} x {BLOCK}")
    if tuple(scales.shape) != (num_rows // BLOCK, num_columns // BLOCK):
        raise ValueError(f"scales are {tuple(scales.shape)} for a weight of {num_rows} x {num_columns}")
    if scales.dtype != torch.float32:
        scales = decode_ue8m0(scales.view(torch.uint8))
    arrivals = torch.zeros(num_rows // 64, dtype=torch.int32, device=values.device)
    return Fp8Weight(values.contiguous(), scales.contiguous(), num_groups, arrivals)


def fp8_linear(
    x: torch.Tensor | Fp8Rows, weight: Fp8Weight, *, out_dtype: torch.dtype = torch.bfloat16, impl: str = AUTO
) -> torch.Tensor:
    """y = x W^T, per group of columns when there are several.

    x: [T, G * K] float, quantised here in groups of 128, or rows that are quantised already. Products are summed in the
    tensor core within 128 columns and in fp32 over the blocks. Batch-invariant among calls of up to 64 rows and among
    larger ones: a row's bits do not depend on the rows beside it, but the two ranges add blocks in another order.
    Calls with the same weight must follow each other on one stream. Returns: [T, G * N] of out_dtype.
    Raises: ValueError when shapes disagree.
    """
    rows = x if isinstance(x, Fp8Rows) else Fp8Rows(*quantise_fp8(x, BLOCK))
    expected = weight.num_groups * weight.values.shape[1]
    if rows.values.shape[1] != expected or rows.scales.shape[1] * BLOCK != expected:
        raise ValueError(
            f"rows {tuple(rows.values.shape)} with scales {tuple(rows.scales.shape)}, expected {expected} columns"
        )
    module = implementation("gemm.fp8", rows.values.device, rows.values.dtype, impl)
    out: torch.Tensor = module.fp8_linear(rows.values, rows.scales, weight, out_dtype)
    return out
