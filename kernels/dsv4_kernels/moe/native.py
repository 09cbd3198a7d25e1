"""Routing in C; the grouped product on plain weights is the reference's, packed ones have their own op."""

import torch

from dsv4_kernels.moe import reference
from dsv4_kernels.native import ops

grouped_experts = reference.grouped_experts
build_work_list = reference.build_work_list


def route_by_score(
    logits: torch.Tensor, bias: torch.Tensor, topk: int, renormalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.route(logits, bias, None, topk, renormalise, scaling)


def route_by_hash(
    logits: torch.Tensor, ids: torch.Tensor, renormalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.route(logits, None, ids, ids.shape[1], renormalise, scaling)
