"""Public mixture-of-experts ops. Source: spec 4.7."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.moe import reference
from dsv4_kernels.moe.work_list import WorkList


def sqrt_softplus(z: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(z)) in the stable form. z: [...] fp32. Returns: [...] fp32."""
    return reference.sqrt_softplus(z)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in fp32. gate, up: [..., I]. Returns: [..., I] fp32."""
    return reference.swiglu(gate, up, limit)


def route_by_score(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, *, renormalise: bool, scaling: float, impl: str = AUTO
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best `topk` experts by score plus bias; the weights are the scores without the bias.

    logits: [T, E] fp32. bias: [E] fp32. Ties go to the lower expert. Returns: ids [T, topk] int64; weights fp32.
    """
    module = implementation("moe", logits.device, logits.dtype, impl)
    return module.route_by_score(logits, bias, topk, renormalise, scaling)


def route_by_hash(
    logits: torch.Tensor, ids: torch.Tensor, *, renormalise: bool, scaling: float, impl: str = AUTO
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts fixed by the token; the learned scores give the weights.

    logits: [T, E] fp32. ids: [T, topk] int64. Returns: ids, unchanged; weights [T, topk] fp32.
    """
    module = implementation("moe", logits.device, logits.dtype, impl)
    return module.route_by_hash(logits, ids, renormalise, scaling)


def build_work_list(
    topk_ids: torch.Tensor, *, num_experts: int, first_expert: int = 0, rows_per_tile: int, impl: str = AUTO
) -> WorkList:
    """Sort the pairs of a routing by expert and cut them into tiles, without a host sync.

    topk_ids: [T, topk] int32 or int64, global expert ids; ids outside [first_expert, first_expert + num_experts), such
    as the -1 of padded rows, are routed nowhere. num_experts: held here, at least 1. rows_per_tile: at least 1.
    """
    module = implementation("moe", topk_ids.device, topk_ids.dtype, impl)
    work: WorkList = module.build_work_list(topk_ids, num_experts, first_expert, rows_per_tile)
    return work


def grouped_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    counts: list[int],
    *,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    limit: float,
    impl: str = AUTO,
) -> torch.Tensor:
    """SwiGLU experts over rows sorted by expert; the routing weight enters before w2, in fp32.

    x: [N, D], the rows of expert 0 first. weights: [N] fp32. counts: rows of each expert, sum N.
    w1, w3: [E, I, D]. w2: [E, D, I]. Returns: [N, D] fp32. Raises: ValueError when the counts do not sum to N.
    """
    if sum(counts) != x.shape[0] or len(counts) != w1.shape[0]:
        raise ValueError(f"{len(counts)} counts with sum {sum(counts)} for {x.shape[0]} rows, {w1.shape[0]} experts")
    module = implementation("moe", x.device, x.dtype, impl)
    return module.grouped_experts(x, weights, counts, w1, w2, w3, limit)
