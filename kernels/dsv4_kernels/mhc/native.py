"""Hyper-connections in C, for four streams. Other shapes go to the reference."""

import torch

from dsv4_kernels.mhc import reference
from dsv4_kernels.native import ops

_STREAMS = 4

sinkhorn = reference.sinkhorn  # alone it is no step of the model


def hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    num_iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not _fits(x):
        return reference.hc_pre(x, fn, scale, base, norm_weight, num_iters, eps, norm_eps)
    return ops.hc_pre(x, fn, scale, base, norm_weight, num_iters, eps, norm_eps)


def hc_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    if not _fits(x) or y.dtype != x.dtype:
        return reference.hc_post(y, x, post, comb)
    return ops.hc_post(y, x, post, comb)


def hc_post_(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    if not _fits(x) or y.dtype != x.dtype:
        return reference.hc_post(y, x, post, comb)
    return ops.hc_post(y, x, post, comb, in_place=True)


def hc_post_pre(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    num_iters: int,
    eps: float,
    norm_eps: float,
    quantise: bool,
) -> reference.Mixed:
    mixed = hc_post(y, x, post, comb)
    collapsed, post, comb = hc_pre(mixed, fn, scale, base, norm_weight, num_iters, eps, norm_eps)
    return reference.Mixed(mixed, collapsed, post, comb, *reference.quantised(collapsed, quantise))


def hc_head(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    if not _fits(x):
        return reference.hc_head(x, fn, scale, base, norm_weight, eps, norm_eps)
    return ops.hc_pre(x, fn, scale, base, norm_weight, 0, eps, norm_eps, is_head=True)[0]


def _fits(x: torch.Tensor) -> bool:
    return x.shape[1] == _STREAMS and x.shape[2] % ops.LANES == 0
