"""Attention of a decode step over rows of paged pools, split over keys."""

from dsv4_kernels.attention.decode.op import decode_attention, decode_attention_fp8
from dsv4_kernels.attention.keys import PoolKeys

__all__ = ["PoolKeys", "decode_attention", "decode_attention_fp8"]
