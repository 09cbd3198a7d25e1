"""The block-scaled product of PyTorch's library, one call per group."""

import torch
from torch.nn.functional import pad

from dsv4_kernels.gemm.fp8.op import Fp8Weight
from dsv4_kernels.quant import decode_ue8m0

_ROWS = 16  # the library takes whole sixteens of rows; it refuses a single one
_SCALE_STRIDE = 4  # the library reads a weight's scales in rows of whole fours


def fp8_linear(values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.shape[0], weight.values.shape[0], dtype=out_dtype, device=values.device)
    if values.shape[0] == 0:
        return out
    behind = -values.shape[0] % _ROWS
    values = pad(values.view(torch.uint8), (0, 0, 0, behind)).view(values.dtype)
    scales = pad(scales, (0, 0, 0, behind))
    num_blocks = weight.scales.shape[1]
    padded = pad(weight.scales, (0, -num_blocks % _SCALE_STRIDE))[:, :num_blocks]
    groups = zip(
        values.chunk(weight.num_groups, 1), scales.chunk(weight.num_groups, 1), weight.values.chunk(weight.num_groups),
        padded.chunk(weight.num_groups), out.chunk(weight.num_groups, 1), strict=True,
    )  # fmt: skip
    for rows, codes, matrix, blocks, target in groups:
        row_scales = decode_ue8m0(codes.t().contiguous()).t()  # the scales of one block of columns lie together
        product = torch._scaled_mm(
            rows.contiguous(), matrix.t(), scale_a=row_scales, scale_b=blocks.t(), out_dtype=torch.bfloat16
        )
        target.copy_(product[: target.shape[0]])
    return out
