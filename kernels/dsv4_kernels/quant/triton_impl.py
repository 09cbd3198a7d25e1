"""FP8 rows in Triton: one program per row and 512 columns. The other formats are the reference's."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

from dsv4_kernels.quant.reference import (
    dequantise_block_fp8,
    dequantise_fp4,
    dequantise_fp8,
    dequantise_index_fp8,
    fake_quant_kv,
    quantise_fp4,
    quantise_index_fp8,
)
from dsv4_kernels.quant.triton_codec import fp8_group_code, to_e4m3
from dsv4_kernels.triton_pdl import uses_ptx, wait_for_previous

__all__ = [
    "dequantise_block_fp8",
    "dequantise_fp4",
    "dequantise_fp8",
    "dequantise_index_fp8",
    "fake_quant_kv",
    "quantise_fp4",
    "quantise_fp8",
    "quantise_index_fp8",
]

_COLUMNS = 512  # of a program, in whole groups


def quantise_fp8(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    dim = x.shape[-1]
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    codes = torch.empty(*x.shape[:-1], dim // group, dtype=torch.uint8, device=x.device)
    groups = triton.next_power_of_2(max(1, min(_COLUMNS, dim) // group))  # a warp: 16 values per thread
    if x.numel():
        grid = (x.numel() // dim, triton.cdiv(dim, groups * group))
        _quantise_kernel[grid](
            x, values, codes, dim=dim, group=group, group_block=triton.next_power_of_2(group), groups=groups,
            num_warps=1,
            use_ptx=uses_ptx(x), launch_pdl=uses_ptx(x),
        )  # fmt: skip
    return values, codes


@triton.jit
def _quantise_kernel(
    x_ptr, values_ptr, codes_ptr, dim: tl.constexpr, group: tl.constexpr, group_block: tl.constexpr,
    groups: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    wait_for_previous(use_ptx)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * groups + tl.arange(0, groups)
    inside = tl.arange(0, group_block)
    at = index[:, None] * group + inside[None, :]
    is_value = (index[:, None] < dim // group) & (inside[None, :] < group)
    x = tl.load(x_ptr + row * dim + at, mask=is_value, other=0.0).to(tl.float32)
    code = fp8_group_code(tl.max(tl.abs(x), 1))
    tl.store(values_ptr + row * dim + at, to_e4m3(x, code[:, None]), mask=is_value)
    tl.store(codes_ptr + row * (dim // group) + index, code.to(tl.uint8), mask=index < dim // group)
