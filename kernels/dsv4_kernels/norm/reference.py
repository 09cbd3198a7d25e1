"""RMSNorm as the formula. Source: spec 3.1."""

import torch

from dsv4_kernels.quant import Fp8Rows
from dsv4_kernels.quant.reference import quantise_fp8

FP8_GROUP = 128  # values that share a scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    if weight is not None:
        normed.mul_(weight)
    return normed.to(x.dtype)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Fp8Rows:
    return Fp8Rows(*quantise_fp8(rms_norm(x, weight, eps), FP8_GROUP))
