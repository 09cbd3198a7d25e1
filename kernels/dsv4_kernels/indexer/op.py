"""Public indexer ops. Source: spec 3.4, 4.5."""

import torch

from dsv4_kernels.dispatch import AUTO, choose
from dsv4_kernels.indexer import native, reference

_IMPLEMENTATIONS = {"reference": reference, "native": native}
_WORKSPACE_VALUES = 1 << 20  # fp32 logits held at once: 4 MiB


def hadamard(x: torch.Tensor, *, impl: str = AUTO) -> torch.Tensor:
    """Orthonormal Hadamard rotation in Sylvester order of the last dim.

    x: [..., dim] float, dim a power of two. Returns: [..., dim] of x's dtype. Raises: ValueError on another dim.
    """
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(f"dim {dim} is not a power of two")
    return _IMPLEMENTATIONS[choose("indexer", x.device, x.dtype, impl)].hadamard(x)


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, *, impl: str = AUTO) -> torch.Tensor:
    """sum_h weights[t, h] * relu(q[t, h] . keys[n]), accumulated in fp32.

    q: [T, H, dim]. keys: [N, dim]. weights: [T, H] fp32, any sign. Returns: [T, N] fp32.
    """
    return _IMPLEMENTATIONS[choose("indexer", q.device, q.dtype, impl)].index_scores(q, keys, weights)


def select_topk(scores: torch.Tensor, num_visible: torch.Tensor, topk: int, *, impl: str = AUTO) -> torch.Tensor:
    """The min(topk, visible) best of each row's first `num_visible` entries; equal scores go to the lower entry.

    scores: [T, N] fp32. num_visible: [T] int64. Returns: [T, min(topk, N)] int64, ascending, -1 = none behind them.
    """
    module = _IMPLEMENTATIONS[choose("indexer", scores.device, scores.dtype, impl)]
    return module.select_topk(scores, num_visible, topk)


def index_topk(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    *,
    impl: str = AUTO,
) -> torch.Tensor:
    """`index_scores` and `select_topk` in one, tiled over queries to a fixed workspace.

    q: [T, H, dim]. keys: [N, dim]. weights: [T, H] fp32. num_visible: [T] int64.
    Returns: [T, min(topk, N)] int64, ascending, -1 = none behind them. Raises: ValueError when q and weights disagree.
    """
    if weights.shape != q.shape[:2]:
        raise ValueError(f"weights {tuple(weights.shape)} do not fit q {tuple(q.shape)}")
    tile = max(1, _WORKSPACE_VALUES // max(1, q.shape[1] * keys.shape[0]))
    module = _IMPLEMENTATIONS[choose("indexer", q.device, q.dtype, impl)]
    return module.index_topk(q, keys, weights, num_visible, topk, tile)
