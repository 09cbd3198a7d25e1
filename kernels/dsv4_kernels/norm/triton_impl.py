"""RMSNorm in Triton: one program per row, the row in registers, stored as it is or quantised."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

from dsv4_kernels.norm.reference import FP8_GROUP
from dsv4_kernels.quant import Fp8Rows
from dsv4_kernels.quant.triton_codec import fp8_group_code, to_e4m3
from dsv4_kernels.triton_pdl import start_next, uses_ptx, wait_for_previous

_WARP_ELEMENTS = 512  # of a row per warp: 16 per thread, two 16-byte loads in bf16


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dim = x.shape[-1]
    if x.numel():
        _launch(x.view(-1, dim), weight, out, None, eps)
    return out


def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> Fp8Rows:
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, dim = x.shape
    values = torch.empty(num_rows, dim, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dim // FP8_GROUP, dtype=torch.uint8, device=x.device)
    if x.numel():
        _launch(x, weight, values, scales, eps)
    return Fp8Rows(values, scales)


def _launch(
    x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor | None, eps: float
) -> None:
    num_rows, dim = x.shape
    block = triton.next_power_of_2(dim)
    _rms_norm_kernel[(num_rows,)](
        x, weight, out, scales, eps, x.stride(0), dim=dim, block=block, group=FP8_GROUP, use_ptx=uses_ptx(x),
        num_warps=min(16, max(1, block // _WARP_ELEMENTS)), launch_pdl=uses_ptx(x),
    )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, scales_ptr, eps, row_stride, dim: tl.constexpr, block: tl.constexpr,
    group: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    wait_for_previous(use_ptx)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < dim
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / dim + eps)
    if weight_ptr is not None:
        normed *= tl.load(weight_ptr + column, mask=inside, other=0.0)
    start_next(use_ptx)
    if scales_ptr is None:
        tl.store(out_ptr + row * dim + column, normed.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        rounded = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        groups = tl.reshape(rounded, block // group, group)
        code = fp8_group_code(tl.max(tl.abs(groups), 1))
        values = tl.reshape(to_e4m3(groups, code[:, None]), block)
        tl.store(out_ptr + row * dim + column, values, mask=inside)
        index = tl.arange(0, block // group)
        tl.store(scales_ptr + row * (dim // group) + index, code.to(tl.uint8), mask=index < dim // group)
