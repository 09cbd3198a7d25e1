"""RMSNorm layer. Source: spec 3.1."""

import torch
from torch import nn

from dsv4_kernels.norm import rms_norm


class RMSNorm(nn.Module):
    """Weight is held in fp32 (exact for bf16 checkpoints): the product with it is fp32 anyway."""

    def __init__(self, dim: int, eps: float, *, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32, device=device), requires_grad=False)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim]. Returns: the same shape and dtype."""
        return rms_norm(x, self.weight, self._eps)
