"""Public RMSNorm ops. Source: spec 3.1."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.norm.reference import FP8_GROUP
from dsv4_kernels.quant import Fp8Rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, impl: str = AUTO) -> torch.Tensor:
    """w * x * rsqrt(mean(x^2) + eps) over the last dim, all in fp32, then one cast.

    x: [..., dim] float. weight: [dim] fp32, or None for the weightless form. Returns: [..., dim] of x's dtype.
    Batch-invariant: a row's bits do not depend on the rows beside it. Raises: ValueError when the weight does not fit.
    """
    _check_weight(x, weight)
    return implementation("norm", x.device, x.dtype, impl).rms_norm(x, weight, eps)


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, impl: str = AUTO) -> Fp8Rows:
    """`rms_norm` and the rows quantised for `gemm.fp8`: what `quantise_fp8(rms_norm(x), 128)` gives, bit for bit.

    The norm is rounded to x's dtype in between, as the published model does it. Of the latents this is the query's: the
    key-value latent goes to the cache, and `kv.op.insert` normalises it there.
    x: [T, K] float; rows may stand apart, as in the query columns of a product with `wq_a` and `wkv`. weight: [K] fp32
    or None. Returns: values [T, K] and scales [T, K / 128]. Batch-invariant. Raises: ValueError when the weight does
    not fit, x has not two dims or K is no multiple of 128. Source: spec 3.2, 4.3.
    """
    _check_weight(x, weight)
    if x.ndim != 2 or x.shape[1] % FP8_GROUP:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected rows of a multiple of {FP8_GROUP}")
    rows: Fp8Rows = implementation("norm", x.device, x.dtype, impl).rms_norm_fp8(x, weight, eps)
    return rows


def _check_weight(x: torch.Tensor, weight: torch.Tensor | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},)")
