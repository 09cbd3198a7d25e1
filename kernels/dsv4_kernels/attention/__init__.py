"""Shared-latent attention with a sink: over rows of paged pools, or over dense rows with masks."""

from dsv4_kernels.attention.keys import BlockKeys
from dsv4_kernels.attention.op import block_attention, masked_attention, paged_attention

__all__ = ["BlockKeys", "block_attention", "masked_attention", "paged_attention"]
