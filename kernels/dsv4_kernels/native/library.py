"""The loaded C library: availability and typed entry points."""

import ctypes
import logging
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch

from dsv4_kernels.native.build import KERNELS, NativeBuildError, build

logger = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_P, _L, _I, _F = c_void_p, c_long, c_int, c_float
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "dsv4_advise_huge": (None, (_P, _L)),
    "dsv4_gemm": (None, (_I, _P, _L, _L, _P, _L, _L, _L, _P, _L, _I)),
    "dsv4_hc_pre": (None, (_I, _P, _L, _L, _P, _P, _P, _P, _I, _F, _F, _P, _P, _P)),
    "dsv4_hc_post": (None, (_I, _P, _P, _P, _P, _L, _L, _P)),
    "dsv4_norm_rope": (None, (_I, _P, _P, _L, _L, _P, _F, _P, _L, _L, _I)),
    "dsv4_attention": (
        _I, (_I, _P, _P, _L, _L, _P, _P, _L, _L, _P, _P, _L, _P, _P, _L, _L, _P, _L, _P, _F),
    ),
    "dsv4_store_rows": (_L, (_P, _L, _P, _P, _L, _L)),
    "dsv4_pool": (None, (_P, _P, _P, _L, _L, _L, _L, _I, _P)),
    "dsv4_index_scores": (None, (_I, _P, _P, _P, _L, _L, _L, _L, _P)),
    "dsv4_moe": (None, (_I, _P, _L, _L, _P, _P, _L, _L, _P, _P, _P, _I, _P)),
    "dsv4_moe_scratch_bytes": (_L, (_I, _L, _L, _L, _L, _L, _L)),
    "dsv4_pack_fp4": (_I, (_P, _L, _L, _L, _P, _P)),
    "dsv4_select_topk": (_I, (_P, _P, _L, _L, _L, _P)),
    "dsv4_route": (None, (_P, _P, _P, _L, _L, _L, _I, _F, _P, _P, _P)),
}  # fmt: skip


def dtype_id(dtype: torch.dtype) -> int:
    """Number by which the C code knows a dtype."""
    return _DTYPES[dtype]


@cache
def load() -> ctypes.CDLL | None:
    """The library, built on first use; None on processors without AVX-512 BF16 and where it cannot be built."""
    if not _is_supported_processor():
        return None
    try:
        path = build(KERNELS, Path.home() / ".cache" / "dsv4-kernels")
        library = ctypes.CDLL(str(path))
    except (NativeBuildError, OSError) as err:
        logger.warning("native CPU kernels are not available, the slower torch ones run instead: %s", err)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """True when tensors of that device and dtype can go to the C kernels."""
    return device.type == "cpu" and dtype in _DTYPES and load() is not None


def _is_supported_processor() -> bool:
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"} <= set(flags.split())
