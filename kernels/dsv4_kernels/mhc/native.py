"""Hyper-connections in C, for four streams. Other shapes go to the reference."""

import torch

from dsv4_kernels.mhc import reference
from dsv4_kernels.mhc.connection import Connection
from dsv4_kernels.native import ops

_STREAMS = 4

sinkhorn = reference.sinkhorn  # alone it is no step of the model


def hc_pre(x: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not _fits(x):
        return reference.hc_pre(x, connection)
    return _collapse(x, connection)


def hc_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    if not _fits(x) or y.dtype != x.dtype:
        return reference.hc_post(y, x, post, comb)
    return ops.hc_post(y, x, post, comb)


def hc_post_(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    if not _fits(x) or y.dtype != x.dtype:
        return reference.hc_post(y, x, post, comb)
    return ops.hc_post(y, x, post, comb, in_place=True)


def hc_post_pre(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, following: Connection
) -> reference.Mixed:
    mixed = hc_post(y, x, post, comb)
    collapsed, post, comb = hc_pre(mixed, following)
    return reference.Mixed(mixed, collapsed, post, comb, *reference.quantised(collapsed, following.quantise))


def hc_head(x: torch.Tensor, connection: Connection) -> torch.Tensor:
    if not _fits(x):
        return reference.hc_head(x, connection)
    return _collapse(x, connection)[0]


def _collapse(x: torch.Tensor, by: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    is_head = by.num_iters is None
    return ops.hc_pre(
        x, by.fn, by.scale, by.base, by.norm_weight, by.num_iters or 0, by.eps, by.norm_eps, is_head=is_head
    )


def _fits(x: torch.Tensor) -> bool:
    return x.shape[1] == _STREAMS and x.shape[2] % ops.LANES == 0
