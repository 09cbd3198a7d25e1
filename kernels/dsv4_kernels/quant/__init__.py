"""Number formats of weights and caches: UE8M0 scales, E4M3 and E2M1 values, and their group quantisers."""

from dsv4_kernels.quant.op import (
    Fp8Rows,
    decode_e2m1,
    decode_ue8m0,
    dequantise_block_fp8,
    dequantise_fp4,
    dequantise_fp8,
    dequantise_index_fp8,
    encode_e2m1,
    encode_ue8m0,
    fake_quant_index,
    fake_quant_kv,
    pack_e2m1,
    quantise_fp4,
    quantise_fp8,
    quantise_index_fp8,
    unpack_e2m1,
)

__all__ = [
    "Fp8Rows",
    "decode_e2m1",
    "decode_ue8m0",
    "dequantise_block_fp8",
    "dequantise_fp4",
    "dequantise_fp8",
    "dequantise_index_fp8",
    "encode_e2m1",
    "encode_ue8m0",
    "fake_quant_index",
    "fake_quant_kv",
    "pack_e2m1",
    "quantise_fp4",
    "quantise_fp8",
    "quantise_index_fp8",
    "unpack_e2m1",
]
