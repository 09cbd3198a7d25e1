"""MXFP4 experts as the formula. Source: spec 4.7, 2.3; the numbers are those of the FP8 kernels, sums excepted."""

import torch

from dsv4_kernels.moe.fp4.layout import BLOCK_K, Fp4Experts, unpack_fp4
from dsv4_kernels.moe.reference import swiglu
from dsv4_kernels.moe.work_list import WorkList
from dsv4_kernels.quant import dequantise_fp8, quantise_fp8


def fp4_experts(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Fp4Experts,
    _first_expert: int,
    shared: torch.Tensor | None,
    work: WorkList,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if scales is None:
        values, scales = quantise_fp8(values, BLOCK_K)
    rows = dequantise_fp8(values, scales)  # [T, D] fp32
    w13, w2 = unpack_fp4(experts.w13), unpack_fp4(experts.w2)
    by_pair = rows.new_zeros(topk_ids.numel(), rows.shape[1])
    columns = (work.tile_expert, work.tile_first, work.tile_rows)
    for expert, first, num_rows in zip(*(column.tolist() for column in columns), strict=True):
        pairs = work.pairs[first : first + num_rows].long()
        if len(pairs):
            hidden = _gate_up(rows[pairs // work.topk], w13[expert], topk_weights.flatten()[pairs], experts.limit)
            by_pair[pairs] = (hidden @ w2[expert].T).bfloat16().float()
    out = torch.zeros_like(rows) if shared is None else shared.float()
    for slot in by_pair.unflatten(0, topk_ids.shape).unbind(1):
        out = out + slot
    return out.to(out_dtype)


def _gate_up(rows: torch.Tensor, w13: torch.Tensor, weights: torch.Tensor, limit: float) -> torch.Tensor:
    """Weighted SwiGLU as the second product sees it. Returns: [N, I] fp32."""
    both = (rows @ w13.T).unflatten(-1, (-1, 2, BLOCK_K))  # [N, tiles, gate or up, 128]
    hidden = swiglu(both[:, :, 0], both[:, :, 1], limit).flatten(1) * weights.unsqueeze(-1)
    return dequantise_fp8(*quantise_fp8(hidden, BLOCK_K))
