"""RMSNorm in C. Rows that the kernel cannot take go to the reference."""

import torch

from dsv4_kernels.native import ops
from dsv4_kernels.norm import reference
from dsv4_kernels.quant import Fp8Rows
from dsv4_kernels.quant.reference import quantise_fp8


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if x.shape[-1] % ops.LANES or not x.is_contiguous() or (weight is not None and weight.dtype != torch.float32):
        return reference.rms_norm(x, weight, eps)
    return ops.norm_rope(x, weight, eps, None)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Fp8Rows:
    return Fp8Rows(*quantise_fp8(rms_norm(x, weight, eps), reference.FP8_GROUP))
