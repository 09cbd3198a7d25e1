"""Attention of a decode step over rows of paged pools, split over keys."""

from dsv4_kernels.attention.decode.op import decode_attention

__all__ = ["decode_attention"]
