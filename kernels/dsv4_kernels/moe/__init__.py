"""Mixture of experts: routing and the grouped expert product."""

from dsv4_kernels.moe.op import grouped_experts, route_by_hash, route_by_score, sqrt_softplus, swiglu

__all__ = ["grouped_experts", "route_by_hash", "route_by_score", "sqrt_softplus", "swiglu"]
