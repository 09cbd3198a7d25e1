"""Attention of a decode step over rows of paged pools, split over keys."""

from dsv4_kernels.attention.decode.op import decode_attention, decode_attention_fp8

__all__ = ["decode_attention", "decode_attention_fp8"]
