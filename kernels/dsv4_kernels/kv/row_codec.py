"""Rows to bytes and back, per format. A row's bytes come in sections: data, then scales where the format has them.

The scales are powers of two and the arithmetic is that of `dsv4_kernels.quant`, so a decoded row equals its fake
quantisation bitwise. Source: spec 3.2, 6.1.
"""

import torch

from dsv4_kernels.kv.row_format import RowFormat
from dsv4_kernels.quant import (
    dequantise_fp4,
    dequantise_fp8,
    dequantise_index_fp8,
    quantise_fp4,
    quantise_fp8,
    quantise_index_fp8,
)

Sections = tuple[torch.Tensor, ...]  # each [N, section width] uint8

_KV_GROUP = 64  # e4m3 values per UE8M0 scale in kv_fp8
_KV_SCALE_ALIGN = 8  # scale bytes per row are padded to this
_FP4_GROUP = 32  # e2m1 values per UE8M0 scale


def section_bytes(fmt: RowFormat) -> tuple[int, ...]:
    """Bytes per row of each section: (data,) or (data, scales). Raises: ValueError when groups do not divide `dim`."""
    if fmt.kind == "plain":
        return (fmt.dim * fmt.dtype.itemsize,)
    if fmt.kind == "index_fp8":
        return fmt.dim, 4
    nope = fmt.dim - fmt.rope_dim
    group = _KV_GROUP if fmt.kind == "kv_fp8" else _FP4_GROUP
    if nope % group:
        raise ValueError(f"{fmt.kind}: {nope} quantised dims are not a multiple of {group}")
    if fmt.kind == "index_fp4":
        return fmt.dim // 2, fmt.dim // _FP4_GROUP
    return nope + 2 * fmt.rope_dim, -(-(nope // group) // _KV_SCALE_ALIGN) * _KV_SCALE_ALIGN


def encode_rows(fmt: RowFormat, rows: torch.Tensor) -> Sections:
    """rows: [N, dim] of any float dtype. Returns: sections of [N, width] uint8; a plain one may share memory."""
    if fmt.kind == "plain":
        return (_bytes(rows.to(fmt.dtype)),)
    if fmt.kind == "kv_fp8":
        return _encode_kv_fp8(fmt, rows)
    if fmt.kind == "index_fp8":
        values, scale = quantise_index_fp8(rows)
        return _bytes(values), _bytes(scale[:, None])
    return quantise_fp4(rows, _FP4_GROUP)


def decode_rows(fmt: RowFormat, sections: Sections) -> torch.Tensor:
    """sections: as `encode_rows` returns them. Returns: [N, dim] of `fmt.dtype`; a plain one may share memory."""
    if fmt.kind == "plain":
        return sections[0].view(fmt.dtype)
    data, scales = sections
    if fmt.kind == "kv_fp8":
        return _decode_kv_fp8(fmt, data, scales)
    if fmt.kind == "index_fp8":
        return dequantise_index_fp8(data.view(torch.float8_e4m3fn), scales.view(torch.float32)[:, 0], fmt.dtype)
    return dequantise_fp4(data, scales, fmt.dtype)


def _encode_kv_fp8(fmt: RowFormat, rows: torch.Tensor) -> Sections:
    nope = fmt.dim - fmt.rope_dim
    values, scales = quantise_fp8(rows[:, :nope], _KV_GROUP)  # [N, nope], [N, nope / 64]
    data = torch.cat((_bytes(values), _bytes(rows[:, nope:].to(torch.bfloat16))), dim=1)
    padding = section_bytes(fmt)[1] - scales.shape[1]
    return data, torch.nn.functional.pad(scales, (0, padding))


def _decode_kv_fp8(fmt: RowFormat, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nope = fmt.dim - fmt.rope_dim
    rows = torch.empty(data.shape[0], fmt.dim, dtype=fmt.dtype, device=data.device)
    values = data[:, :nope].view(torch.float8_e4m3fn)
    rows[:, :nope] = dequantise_fp8(values, scales[:, : nope // _KV_GROUP])
    rows[:, nope:] = data[:, nope:].view(torch.bfloat16)
    return rows


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
