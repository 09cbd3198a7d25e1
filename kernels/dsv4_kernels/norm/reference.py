"""RMSNorm as the formula. Source: spec 3.1."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    if weight is not None:
        normed.mul_(weight)
    return normed.to(x.dtype)
