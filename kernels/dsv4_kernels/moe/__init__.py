"""Mixture of experts: routing and the grouped expert product."""

from dsv4_kernels.moe.op import (
    build_work_list,
    grouped_experts,
    route_by_hash,
    route_by_score,
    sqrt_softplus,
    swiglu,
)
from dsv4_kernels.moe.work_list import WorkList, max_tiles

__all__ = [
    "WorkList",
    "build_work_list",
    "grouped_experts",
    "max_tiles",
    "route_by_hash",
    "route_by_score",
    "sqrt_softplus",
    "swiglu",
]
