"""The routed experts of one rank, stacked, so that one loop of matrix products serves all of them."""

import torch
from torch import nn

from dsv4_cluster.moe.base import Dispatched
from dsv4_kernels.gemm import PackedExperts, pack_experts
from dsv4_kernels.moe import grouped_experts


class Experts(nn.Module):
    """w1 = gate, w3 = up, w2 = down projection of every local expert. Source: spec 2.3, 4.7."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, limit: float, *, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()

        def stack(rows: int, columns: int) -> nn.Parameter:
            values = torch.empty(num_experts, rows, columns, dtype=dtype, device=device)
            return nn.Parameter(values, requires_grad=False)

        self.w1 = stack(intermediate_size, hidden_size)  # [E_local, I, D]
        self.w2 = stack(hidden_size, intermediate_size)  # [E_local, D, I]
        self.w3 = stack(intermediate_size, hidden_size)  # [E_local, I, D]
        self._limit = limit
        self.packed: PackedExperts | None = None

    def pack(self) -> None:
        """Lay the loaded weights out for the CPU kernels, where they exist; parameters are not readable afterwards."""
        self.packed = pack_experts(self.w1, self.w2, self.w3, self._limit)
        if self.packed is not None:
            for weight, matrix in zip((self.w1, self.w2, self.w3), self.packed.matrices, strict=True):
                weight.data = matrix.data  # one copy in memory

    def forward(self, dispatched: Dispatched) -> torch.Tensor:
        """Returns: [N, D] fp32, the weighted expert outputs in the order of the dispatched rows."""
        return grouped_experts(
            dispatched.x, dispatched.weights, dispatched.counts, w1=self.w1, w2=self.w2, w3=self.w3, limit=self._limit
        )
