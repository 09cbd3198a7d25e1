"""Manifold-constrained hyper-connections: mixing the parallel residual streams in and out of a sub-layer."""

from dsv4_kernels.mhc.op import hc_head, hc_post, hc_post_, hc_post_pre, hc_pre, sinkhorn

__all__ = ["hc_head", "hc_post", "hc_post_", "hc_post_pre", "hc_pre", "sinkhorn"]
