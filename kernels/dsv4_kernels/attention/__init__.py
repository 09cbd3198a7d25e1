"""Shared-latent attention with a sink: over rows of paged pools, or over dense rows with masks."""

from dsv4_kernels.attention.op import masked_attention, paged_attention

__all__ = ["masked_attention", "paged_attention"]
