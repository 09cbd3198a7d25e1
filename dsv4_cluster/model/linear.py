"""Bias-free linear layers that hold one rank's slice. Source: spec 2.4, 7.1."""

import torch
from torch import nn
from torch.nn.functional import linear

from dsv4_cluster.parallel.collectives import all_reduce, axis_rank
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.shard import ShardRule
from dsv4_kernels.gemm import PackedWeight, pack_weight, packed_linear


def local_size(size: int, unit: int, parallel: ParallelState) -> int:
    """Part of `size` that one tensor-parallel rank owns, in whole units. Raises: ConfigError when it does not fit."""
    first, last = ShardRule(0, "tp", unit).bounds(size, *axis_rank(parallel, "tp"))
    return last - first


class Linear(nn.Module):
    """y = x W^T with `weight` [out, in]; replicated, or split by output rows when the caller passes local sizes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """out_dtype: fp32 keeps the sums as they are; default: x's dtype."""
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._out_dtype = out_dtype
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Lay the loaded weight out for the CPU kernels, where they exist; `weight` is not readable afterwards."""
        self._packed = pack_weight(self.weight)
        if self._packed is not None:
            self.weight.data = self._packed.data.view(self.weight.shape)  # one copy in memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns: [..., out] of x's dtype or `out_dtype`."""
        if self._packed is not None:
            return packed_linear(x, self._packed, self._out_dtype)
        if self._out_dtype is None or self._out_dtype == x.dtype:
            return linear(x, self.weight)
        return linear(x.to(self._out_dtype), self.weight.to(self._out_dtype))


class GroupedLinear(nn.Module):
    """One product per output group; the weight stacks the groups' rows, [G * rank, group_dim]."""

    def __init__(
        self, group_dim: int, out_per_group: int, num_groups: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        weight = torch.empty(num_groups * out_per_group, group_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._num_groups = num_groups
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """As `Linear.pack`."""
        self._packed = pack_weight(self.weight, num_groups=self._num_groups)
        if self._packed is not None:
            self.weight.data = self._packed.data.view(self.weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, G * group_dim]. Returns: [T, G * out_per_group]."""
        if self._packed is not None:
            return packed_linear(x, self._packed)
        grouped = x.view(x.shape[0], self._num_groups, -1).transpose(0, 1)  # [G, T, group_dim]
        weight = self.weight.view(self._num_groups, -1, self.weight.shape[1])  # [G, out, group_dim]
        return torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1).flatten(1)


class RowParallelLinear(Linear):
    """Input columns are split over ranks; the partial outputs are summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: ParallelState,
        *,
        unit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(local_size(in_features, unit, parallel), out_features, dtype=dtype, device=device)
        self._parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in / tp_size]. Returns: [..., out], the sum over ranks."""
        return all_reduce(super().forward(x), self._parallel, "tp")
