"""The block-scaled product as the formula: plain values, plain product in fp32. Source: spec 2.2."""

import torch

from dsv4_kernels.gemm.fp8.op import BLOCK, Fp8Weight
from dsv4_kernels.quant import dequantise_block_fp8, dequantise_fp8


def fp8_linear(values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    rows = dequantise_fp8(values, scales).unflatten(1, (weight.num_groups, -1))  # [T, G, K]
    plain = dequantise_block_fp8(weight.values, weight.scales, block=BLOCK)
    grouped = plain.unflatten(0, (weight.num_groups, -1))  # [G, N, K]
    return torch.einsum("tgk,gnk->tgn", rows, grouped).flatten(1).to(out_dtype)
