"""Interleaved rotary embedding of the trailing dims, plain and YaRN."""

from dsv4_kernels.rope.op import apply_rope_, norm_rope, norm_rope_, plain_frequencies, rotations, yarn_frequencies

__all__ = ["apply_rope_", "norm_rope", "norm_rope_", "plain_frequencies", "rotations", "yarn_frequencies"]
