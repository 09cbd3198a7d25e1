"""Public hyper-connection ops; S is the number of streams. Source: spec 4.2.

The Triton forms are batch-invariant: a token's bits do not depend on the tokens beside it, nor on their number.
"""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.mhc.connection import Connection
from dsv4_kernels.mhc.reference import Mixed

_FP8_GROUP = 128


def sinkhorn(logits: torch.Tensor, num_iters: int, eps: float, *, impl: str = AUTO) -> torch.Tensor:
    """Project onto the (almost) doubly stochastic matrices: softmax, then column and row divisions in turn.

    logits: [T, S, S] fp32, row = source stream, column = destination. Returns: [T, S, S] fp32, columns sum to 1.
    """
    return implementation("mhc", logits.device, logits.dtype, impl).sinkhorn(logits, num_iters, eps)


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
    module = implementation("mhc", x.device, x.dtype, impl)
    return module.hc_pre(x, Connection(fn, scale, base, norm_weight, eps, norm_eps, num_iters))


def hc_post(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, impl: str = AUTO
) -> torch.Tensor:
    """X'[k] = post[k] * y + sum_j comb[j, k] * X[j], in fp32 with one cast.

    y: [T, D] sub-layer output. x: [T, S, D]. post: [T, S] fp32. comb: [T, S, S] fp32. Returns: [T, S, D].
    """
    return implementation("mhc", x.device, x.dtype, impl).hc_post(y, x, post, comb)


def hc_post_(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, impl: str = AUTO
) -> torch.Tensor:
    """`hc_post` where x is not needed afterwards: the result may take its place. Use only what is returned."""
    return implementation("mhc", x.device, x.dtype, impl).hc_post_(y, x, post, comb)


def hc_post_pre(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    num_iters: int,
    eps: float,
    norm_eps: float,
    norm_weight: torch.Tensor | None = None,
    quantise: bool = False,
    impl: str = AUTO,
) -> Mixed:
    """`hc_post` of one sub-layer and `hc_pre` of the next in one pass over the streams.

    y, x, post, comb: as in `hc_post`. fn, scale, base, num_iters, eps, norm_eps, norm_weight: as in `hc_pre`.
    quantise: also return the sub-layer's input in E4M3 with a scale per 128 values, as `quant.quantise_fp8` does it.
    Raises: ValueError when fn does not fit x, or D is no multiple of 128 where it is to be quantised.
    """
    streams = x.shape[1]
    _check_fn(x, fn, (2 + streams) * streams)
    if quantise and x.shape[2] % _FP8_GROUP:
        raise ValueError(f"{x.shape[2]} channels are not a multiple of {_FP8_GROUP}")
    module = implementation("mhc", x.device, x.dtype, impl)
    following = Connection(fn, scale, base, norm_weight, eps, norm_eps, num_iters, quantise)
    return module.hc_post_pre(y, x, post, comb, following)  # type: ignore[no-any-return]


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
    module = implementation("mhc", x.device, x.dtype, impl)
    return module.hc_head(x, Connection(fn, scale, base, norm_weight, eps, norm_eps))


def _check_fn(x: torch.Tensor, fn: torch.Tensor, rows: int) -> None:
    expected = (rows, x.shape[1] * x.shape[2])
    if tuple(fn.shape) != expected:
        raise ValueError(f"fn has shape {tuple(fn.shape)}, expected {expected}")
