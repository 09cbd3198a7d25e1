"""MXFP4 experts on FP8 tensor cores: the packed weights and the whole product, from rows to summed rows."""

from dsv4_kernels.moe.fp4.layout import (
    Fp4Experts,
    Fp4LayoutError,
    PackedFp4,
    can_pack,
    pack_fp4_experts,
    unpack_codes,
    unpack_fp4,
)
from dsv4_kernels.moe.fp4.op import fp4_experts, rows_per_tile

__all__ = [
    "Fp4Experts",
    "Fp4LayoutError",
    "PackedFp4",
    "can_pack",
    "fp4_experts",
    "pack_fp4_experts",
    "rows_per_tile",
    "unpack_codes",
    "unpack_fp4",
]
