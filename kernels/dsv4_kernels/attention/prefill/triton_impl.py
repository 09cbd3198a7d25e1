"""Prefill attention in Triton: one launch, no parts to merge."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import math
from typing import Any

import torch
import triton

from dsv4_kernels.attention.keys import Ending, PoolKeys, WindowKeys
from dsv4_kernels.attention.prefill.triton_kernels import prefill_kernel
from dsv4_kernels.attention.triton_core import DEFAULT_STEP, ROW_BYTES, Step, empty_fp8, turns_of
from dsv4_kernels.kv.triton_rows import pool_views
from dsv4_kernels.triton_pdl import uses_ptx

_HEADS = 64  # of one program, the row operand of the tensor core; fewer are padded


def prefill_attention(
    q: torch.Tensor, window: WindowKeys, entries: PoolKeys | None, ending: Ending, step: Step = DEFAULT_STEP
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, window, entries, ending, step, out, None)
    return out


def prefill_attention_fp8(
    q: torch.Tensor, window: WindowKeys, entries: PoolKeys | None, ending: Ending, step: Step = DEFAULT_STEP
) -> tuple[torch.Tensor, torch.Tensor]:
    out, codes = empty_fp8(q)
    _launch(q, window, entries, ending, step, out, codes)
    return out, codes


def _launch(q, window, entries, ending, step, out, codes) -> None:
    """Fills `out` in bf16, or with `codes` in E4M3 and scale bytes."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    rows, ptx = window.rows.contiguous(), uses_ptx(q)
    pool: tuple[Any, ...] = (None, None, None, 0, 0, 0, 0)
    rows_per_page, kind = 1, None
    if entries is not None:
        views, slots = pool_views(entries.pool), entries.slots.contiguous()
        rows_per_page, kind = entries.pool.rows_per_page, entries.pool.format.kind
        pool = (
            views.values, slots, entries.counts, slots.shape[1],
            slots.shape[1] if slots.shape[0] > 1 else 0, views.num_slots, views.page_bytes // ROW_BYTES.value,
        )  # fmt: skip
    prefill_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        q.contiguous(), rows, window.begin.contiguous(), window.end.contiguous(), rows.shape[0], *pool,
        ending.sink, turns_of(ending), out, codes, num_heads, ending.scale / math.log(2), ROWS=rows_per_page, KIND=kind,
        HEADS=_HEADS, KEYS=step.keys, USE_PTX=ptx, num_warps=8,
        num_stages=step.stages, launch_pdl=ptx,
    )  # fmt: skip
