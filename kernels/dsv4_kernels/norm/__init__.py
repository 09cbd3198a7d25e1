"""Root-mean-square normalisation, with and without a weight, and with the rows quantised for an FP8 product."""

from dsv4_kernels.norm.op import rms_norm, rms_norm_fp8

__all__ = ["rms_norm", "rms_norm_fp8"]
