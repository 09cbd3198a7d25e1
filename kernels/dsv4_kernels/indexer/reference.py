"""Indexer scores and exact top-k as the formulas. Source: spec 3.4, 4.5."""

from collections.abc import Callable
from functools import cache

import torch

_INDEX_BITS = 32


@cache
def hadamard_matrix(dim: int) -> torch.Tensor:
    """Sylvester Hadamard matrix, orthonormal. Returns: [dim, dim] fp32 on CPU."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix * dim**-0.5


def hadamard(x: torch.Tensor) -> torch.Tensor:
    return (x.float() @ hadamard_matrix(x.shape[-1]).to(x.device)).to(x.dtype)


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = (q.float().flatten(0, 1) @ keys.float().T).relu_()  # [T * H, N]
    return torch.bmm(weights.unsqueeze(1), logits.view(*q.shape[:2], keys.shape[0])).squeeze(1)  # [T, N]


def select_topk(scores: torch.Tensor, num_visible: torch.Tensor, topk: int) -> torch.Tensor:
    entry = torch.arange(scores.shape[1], device=scores.device)
    visible = entry < num_visible.unsqueeze(1)  # [T, N]
    # One integer key per entry, score first, then the lower entry: unique keys make any top-k exact and repeatable.
    key = (_ordered_bits(scores) << _INDEX_BITS) + (scores.shape[1] - entry)
    key = key.masked_fill_(~visible, torch.iinfo(torch.int64).min)
    ids = key.topk(min(topk, scores.shape[1]), dim=1).indices  # [T, k]
    return torch.where(ids < num_visible.unsqueeze(1), ids, -1)


def index_topk(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    tile: int,
    scores: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = index_scores,
) -> torch.Tensor:
    ids = [
        select_topk(
            scores(q[first : first + tile], keys, weights[first : first + tile]),
            num_visible[first : first + tile],
            topk,
        )
        for first in range(0, q.shape[0], tile)
    ]
    return torch.cat(ids) if ids else num_visible.new_empty(0, min(topk, keys.shape[0]))


def _ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """int64 that orders like the fp32 values; both zeros are equal."""
    bits = (x + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    return torch.where(bits >= 0, bits, (-(2**31)) - bits)
