"""Public hyper-connection ops; S is the number of streams. Source: spec 4.2."""

import torch

from dsv4_kernels.dispatch import AUTO, choose
from dsv4_kernels.mhc import native, reference

_IMPLEMENTATIONS = {"reference": reference, "native": native}


def sinkhorn(logits: torch.Tensor, num_iters: int, eps: float, *, impl: str = AUTO) -> torch.Tensor:
    """Project onto the (almost) doubly stochastic matrices: softmax, then column and row divisions in turn.

    logits: [T, S, S] fp32, row = source stream, column = destination. Returns: [T, S, S] fp32, columns sum to 1.
    """
    return _IMPLEMENTATIONS[choose("mhc", logits.device, logits.dtype, impl)].sinkhorn(logits, num_iters, eps)


def hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    num_iters: int,
    eps: float,
    norm_eps: float,
    norm_weight: torch.Tensor | None = None,
    impl: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the streams into a sub-layer's input and compute how its output mixes back.

    x: [T, S, D]. fn: [(2 + S) * S, S * D] fp32. scale: [3] fp32. base: [(2 + S) * S] fp32. norm_weight: [D] fp32 of
    the RMS norm that follows, in the same pass; None = no norm.
    Returns: y [T, D] of x's dtype; post [T, S] fp32; comb [T, S, S] fp32.
    Raises: ValueError when fn does not fit x.
    """
    streams = x.shape[1]
    _check_fn(x, fn, (2 + streams) * streams)
    module = _IMPLEMENTATIONS[choose("mhc", x.device, x.dtype, impl)]
    return module.hc_pre(x, fn, scale, base, norm_weight, num_iters, eps, norm_eps)


def hc_post(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, impl: str = AUTO
) -> torch.Tensor:
    """X'[k] = post[k] * y + sum_j comb[j, k] * X[j], in fp32 with one cast.

    y: [T, D] sub-layer output. x: [T, S, D]. post: [T, S] fp32. comb: [T, S, S] fp32. Returns: [T, S, D].
    """
    return _IMPLEMENTATIONS[choose("mhc", x.device, x.dtype, impl)].hc_post(y, x, post, comb)


def hc_head(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
    norm_weight: torch.Tensor | None = None,
    impl: str = AUTO,
) -> torch.Tensor:
    """Collapse the streams for the language-model head; no Sinkhorn.

    x: [T, S, D]. fn: [S, S * D] fp32. scale: [1] fp32. base: [S] fp32. norm_weight: as in `hc_pre`.
    Returns: [T, D] of x's dtype.
    """
    _check_fn(x, fn, x.shape[1])
    module = _IMPLEMENTATIONS[choose("mhc", x.device, x.dtype, impl)]
    return module.hc_head(x, fn, scale, base, norm_weight, eps, norm_eps)


def _check_fn(x: torch.Tensor, fn: torch.Tensor, rows: int) -> None:
    expected = (rows, x.shape[1] * x.shape[2])
    if tuple(fn.shape) != expected:
        raise ValueError(f"fn has shape {tuple(fn.shape)}, expected {expected}")
