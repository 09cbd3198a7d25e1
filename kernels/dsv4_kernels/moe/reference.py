"""Routing and experts as the formulas. Source: spec 4.7."""

import torch
from torch.nn.functional import silu

from dsv4_kernels.moe.work_list import build_work_list

__all__ = ["build_work_list", "grouped_experts", "route_by_hash", "route_by_score", "sqrt_softplus", "swiglu"]

_RENORM_FLOOR = 1e-20  # a hash-routed token may score zero on all its experts


def sqrt_softplus(z: torch.Tensor) -> torch.Tensor:
    """The stable form: the naive one gives 0 at -20 and inf at 100."""
    return (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))).sqrt_()


def route_by_score(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, renormalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = sqrt_softplus(logits)
    # The bias selects only; a stable sort gives equal scores to the lower expert, the same on every rank.
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return ids, _weights(scores, ids, renormalise, scaling)


def route_by_hash(
    logits: torch.Tensor, ids: torch.Tensor, renormalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return ids, _weights(sqrt_softplus(logits), ids, renormalise, scaling)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """The gate is clamped from above only, before SiLU."""
    return silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    counts: list[int],
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    gate = x.new_empty(x.shape[0], w1.shape[1])
    up = torch.empty_like(gate)
    out = torch.empty_like(x)
    groups = _groups(counts)
    for expert, first, last in groups:
        torch.mm(x[first:last], w1[expert].T, out=gate[first:last])
        torch.mm(x[first:last], w3[expert].T, out=up[first:last])
    hidden = (swiglu(gate, up, limit) * weights.unsqueeze(-1)).to(x.dtype)
    for expert, first, last in groups:
        torch.mm(hidden[first:last], w2[expert].T, out=out[first:last])
    return out.float()


def _groups(counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows."""
    groups, first = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append((expert, first, first + count))
        first += count
    return groups


def _weights(scores: torch.Tensor, ids: torch.Tensor, renormalise: bool, scaling: float) -> torch.Tensor:
    chosen = scores.gather(1, ids)
    if renormalise:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _RENORM_FLOOR)
    return chosen * scaling
