"""Collectives of one process-mesh axis; every one is the identity on an axis of size 1."""

from typing import Literal

import torch
import torch.distributed as dist

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.parallel.state import ParallelState

Axis = Literal["tp", "ep"]


def axis_rank(parallel: ParallelState, axis: Axis) -> tuple[int, int]:
    """(rank, size) along an axis."""
    if axis == "tp":
        return parallel.tp_rank, parallel.tp_size
    return parallel.ep_rank, parallel.ep_size


def all_reduce(x: torch.Tensor, parallel: ParallelState, axis: Axis) -> torch.Tensor:
    """Sum over the ranks of an axis. x: any shape, mutated when the axis has several ranks. Returns: the sum."""
    if axis_rank(parallel, axis)[1] > 1:
        _check_group(parallel, axis)
        dist.all_reduce(x)
    return x


def all_gather(x: torch.Tensor, parallel: ParallelState, axis: Axis, *, dim: int) -> torch.Tensor:
    """Concatenate the ranks' equally shaped tensors along `dim`, in rank order."""
    _, size = axis_rank(parallel, axis)
    if size == 1:
        return x
    _check_group(parallel, axis)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=dim)


def _check_group(parallel: ParallelState, axis: Axis) -> None:
    """An axis of several ranks is the whole process group. Raises: ConfigError when it is not."""
    size = axis_rank(parallel, axis)[1]
    if not dist.is_initialized() or dist.get_world_size() != size:
        world = dist.get_world_size() if dist.is_initialized() else 1
        raise ConfigError(f"{axis}_size is {size}, but the process group has {world} ranks")
