"""Products of FP8 rows with FP8 weights that have one scale per 128 x 128 block."""

from dsv4_kernels.gemm.fp8.op import Fp8Weight, fp8_linear, make_fp8_weight

__all__ = ["Fp8Weight", "fp8_linear", "make_fp8_weight"]
