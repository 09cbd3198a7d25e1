"""Public RMSNorm op. Source: spec 3.1."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, impl: str = AUTO) -> torch.Tensor:
    """w * x * rsqrt(mean(x^2) + eps) over the last dim, all in fp32, then one cast.

    x: [..., dim] float. weight: [dim] fp32, or None for the weightless form. Returns: [..., dim] of x's dtype.
    Batch-invariant: a row's bits do not depend on the rows beside it. Raises: ValueError when the weight does not fit.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},)")
    return implementation("norm", x.device, x.dtype, impl).rms_norm(x, weight, eps)
