"""Hyper-connections as the formula, all in fp32. Source: spec 4.2."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from dsv4_kernels.mhc.connection import Connection
from dsv4_kernels.norm.reference import rms_norm
from dsv4_kernels.quant.reference import quantise_fp8

_FP8_GROUP = 128


@dataclass(frozen=True, slots=True)
class Mixed:
    """Streams after a sub-layer, and what the next one needs."""

    x: torch.Tensor  # [T, S, D]
    y: torch.Tensor  # [T, D] of x's dtype, normed when there is a weight
    post: torch.Tensor  # [T, S] fp32
    comb: torch.Tensor  # [T, S, S] fp32
    values: torch.Tensor | None  # [T, D] float8_e4m3fn: y quantised
    scales: torch.Tensor | None  # [T, D / 128] uint8, UE8M0


def sinkhorn(logits: torch.Tensor, num_iters: int, eps: float) -> torch.Tensor:
    # Tokens last: the sums over streams then run along contiguous memory, and the values do not change.
    matrix = logits.softmax(-1).add_(eps).permute(1, 2, 0).contiguous()  # [source, destination, T]
    floor = logits.new_full((), eps)
    matrix.div_(matrix.sum(0, keepdim=True).add_(floor))  # columns
    for _ in range(num_iters - 1):
        matrix.div_(matrix.sum(1, keepdim=True).add_(floor))  # rows
        matrix.div_(matrix.sum(0, keepdim=True).add_(floor))
    return matrix.permute(2, 0, 1)


def hc_pre(x: torch.Tensor, connection: Connection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale, base, eps, num_iters = connection.scale, connection.base, connection.eps, connection.num_iters
    assert num_iters is not None
    streams = x.shape[1]
    wide = x.float()
    mix = _normed_mix(wide, connection)  # [T, (2 + S) * S]
    pre = torch.sigmoid(mix[:, :streams] * scale[0] + base[:streams]) + eps
    post = 2 * torch.sigmoid(mix[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    logits = mix[:, 2 * streams :] * scale[2] + base[2 * streams :]
    comb = sinkhorn(logits.unflatten(-1, (streams, streams)), num_iters, eps)  # [T, source, destination]
    return _normed(_collapse(pre, wide).to(x.dtype), connection), post, comb


def hc_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    added = post.unsqueeze(-1) * y.float().unsqueeze(1)  # [T, S, D]
    # The contraction is over the first (source) index of comb; the other direction looks plausible and is wrong.
    return added.baddbmm_(comb.transpose(1, 2), x.float()).to(x.dtype)


hc_post_ = hc_post


def hc_post_pre(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, following: Connection
) -> Mixed:
    mixed = hc_post(y, x, post, comb)
    collapsed, post, comb = hc_pre(mixed, following)
    return Mixed(mixed, collapsed, post, comb, *quantised(collapsed, following.quantise))


def hc_head(x: torch.Tensor, connection: Connection) -> torch.Tensor:
    wide = x.float()
    pre = torch.sigmoid(_normed_mix(wide, connection) * connection.scale[0] + connection.base) + connection.eps
    return _normed(_collapse(pre, wide).to(x.dtype), connection)


def quantised(y: torch.Tensor, quantise: bool) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    return quantise_fp8(y, _FP8_GROUP) if quantise else (None, None)


def _normed_mix(wide: torch.Tensor, connection: Connection) -> torch.Tensor:
    """Weightless RMS norm over all streams, applied after the projection."""
    flat = wide.flatten(1)  # stream-major: index = stream * D + d
    return linear(flat, connection.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True).add_(connection.norm_eps))


def _collapse(pre: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    return torch.bmm(pre.unsqueeze(1), wide).squeeze(1)  # [T, D]


def _normed(y: torch.Tensor, connection: Connection) -> torch.Tensor:
    weight = connection.norm_weight
    return y if weight is None else rms_norm(y, weight, connection.norm_eps)
