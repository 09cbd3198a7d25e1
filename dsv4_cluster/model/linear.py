"""Bias-free linear layers that hold one rank's slice. Source: spec 2.4, 7.1."""

import torch
from torch import nn
from torch.nn.functional import linear

from dsv4_cluster.parallel.collectives import Axis, all_reduce, axis_rank
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.shard import ShardRule


def local_size(size: int, unit: int, parallel: ParallelState, axis: Axis = "tp") -> int:
    """Part of `size` that one rank owns, in whole units. Raises: ConfigError when it does not divide."""
    first, last = ShardRule(0, axis, unit).bounds(size, *axis_rank(parallel, axis))
    return last - first


class Linear(nn.Module):
    """y = x W^T with `weight` [out, in]; replicated, or split by output rows when the caller passes local sizes."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns: [..., out] of x's dtype."""
        return linear(x, self.weight)


class GroupedLinear(nn.Module):
    """One product per output group; the weight stacks the groups' rows, [G * rank, group_dim]."""

    def __init__(
        self, group_dim: int, out_per_group: int, num_groups: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        weight = torch.empty(num_groups * out_per_group, group_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._num_groups = num_groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, G * group_dim]. Returns: [T, G * out_per_group]."""
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
        return all_reduce(linear(x, self.weight), self._parallel, "tp")
