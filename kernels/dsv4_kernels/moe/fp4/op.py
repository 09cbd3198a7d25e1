"""Public op of the MXFP4 experts. Source: spec 4.7."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.moe.fp4.layout import Fp4Experts
from dsv4_kernels.moe.op import build_work_list
from dsv4_kernels.moe.work_list import WorkList
from dsv4_kernels.quant import Fp8Rows


def rows_per_tile(num_tokens: int, topk: int, num_experts: int) -> int:
    """Rows of a tile of the work list that `fp4_experts` wants for this many tokens; a function of shapes only."""
    average = num_tokens * topk / num_experts  # rows of an expert under even routing
    if average <= 16:  # 512 tokens of 6 in 256 experts: 881 us with 16 rows, 1,081 us with 32
        return 16
    return 32 if average <= 40 else 64


def fp4_experts(
    x: torch.Tensor | Fp8Rows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Fp4Experts,
    *,
    first_expert: int = 0,
    shared: torch.Tensor | None = None,
    work: WorkList | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str = AUTO,
) -> torch.Tensor:
    """Routed SwiGLU experts: FP8 rows times FP4 weights, routing weight before the second product, sum over slots.

    x: [T, D] float, quantised here, or rows that are quantised already. topk_ids: [T, topk] int32 or int64, global; ids
    outside [first_expert, first_expert + E) contribute nothing. topk_weights: [T, topk] fp32. shared: [T, D] float,
    added before the routed ones, or None. work: the routing's work list of `rows_per_tile` rows, made here when None.
    Sums are fp32 within 128 columns, then fp32 over the blocks in order; an expert's row is rounded to bf16, and the
    slots are summed in order in fp32. Batch-invariant: a token's bits do not depend on the tokens beside it.
    Returns: [T, D] of out_dtype. Raises: ValueError when shapes disagree.
    """
    values, scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    num_tokens, hidden_size = values.shape
    if hidden_size != experts.hidden_size or topk_ids.shape != topk_weights.shape or len(topk_ids) != num_tokens:
        raise ValueError(
            f"rows {tuple(values.shape)}, ids {tuple(topk_ids.shape)}, weights {tuple(topk_weights.shape)} "
            f"for experts of hidden size {experts.hidden_size}"
        )
    if work is None:
        tile = rows_per_tile(num_tokens, topk_ids.shape[1], experts.num_experts)
        work = build_work_list(topk_ids, num_experts=experts.num_experts, first_expert=first_expert, rows_per_tile=tile)
    module = implementation("moe.fp4", values.device, torch.float8_e4m3fn, impl)
    out: torch.Tensor = module.fp4_experts(
        values, scales, topk_ids, topk_weights, experts, first_expert, shared, work, out_dtype
    )
    return out
