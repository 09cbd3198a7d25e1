"""Rotation in C. Rows that the kernel cannot take go to the reference."""

import torch

from dsv4_kernels.native import ops
from dsv4_kernels.rope import reference


def apply_rope_(x: torch.Tensor, cis: torch.Tensor, inverse: bool) -> torch.Tensor:
    if not x.is_contiguous() or not cis.is_contiguous():
        return reference.apply_rope_(x, cis, inverse)
    return ops.norm_rope(x, None, None, cis, inverse=inverse)


def norm_rope(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cis: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous() or not cis.is_contiguous() or x.shape[-1] % ops.LANES:
        return reference.norm_rope(x, weight, eps, cis)
    return ops.norm_rope(x, weight, eps, cis)


def norm_rope_(x: torch.Tensor, weight: torch.Tensor | None, eps: float, cis: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous() or not cis.is_contiguous() or x.shape[-1] % ops.LANES:
        return reference.norm_rope(x, weight, eps, cis)
    return ops.norm_rope(x, weight, eps, cis, in_place=True)
