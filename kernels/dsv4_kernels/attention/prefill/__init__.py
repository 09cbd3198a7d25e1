"""Attention of a prompt's chunk over its window rows and rows of a pool."""

from dsv4_kernels.attention.keys import PoolKeys, WindowKeys
from dsv4_kernels.attention.prefill.op import prefill_attention, prefill_attention_fp8

__all__ = ["PoolKeys", "WindowKeys", "prefill_attention", "prefill_attention_fp8"]
