"""Products with weights that were packed once, after loading."""

from dsv4_kernels.gemm.op import (
    PackedExperts,
    PackedWeight,
    fp4_bytes,
    pack_experts,
    pack_weight,
    packed_experts,
    packed_linear,
    shared_expert,
)

__all__ = [
    "PackedExperts",
    "PackedWeight",
    "fp4_bytes",
    "pack_experts",
    "pack_weight",
    "packed_experts",
    "packed_linear",
    "shared_expert",
]
