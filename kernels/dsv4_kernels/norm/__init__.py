"""Root-mean-square normalisation, with and without a weight."""

from dsv4_kernels.norm.op import rms_norm

__all__ = ["rms_norm"]
