"""Public ops: attention of a prompt's chunk, sink and counter-rotation included. Source: spec 4.3."""

import torch

from dsv4_kernels.attention.checks import DIM, check_pool, check_queries
from dsv4_kernels.attention.keys import Ending, PoolKeys, WindowKeys
from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.quant import Fp8Rows


def prefill_attention(
    q: torch.Tensor,
    window: WindowKeys,
    entries: PoolKeys | None,
    *,
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    impl: str = AUTO,
) -> torch.Tensor:
    """One softmax per token and head over its window rows and its rows of a pool; no row is gathered to memory.

    q: [T, H, 512] bf16, rotated, of one or several sequences. window, entries: see there; a range is cut to the rows
    that exist and may be empty. sink: [H] fp32 raw logits, or None. cis: [T, 32] complex64 of `rotations` of the
    queries' positions; the last 64 dims of the result are rotated back by them, None = they stay.
    Returns: [T, H, 512] bf16; zero for a token without keys. Batch-invariant.
    Raises: ValueError when shapes, dtypes or formats do not fit.
    """
    ending = _checked(q, window, entries, Ending(sink, cis, scale))
    module = implementation("attention.prefill", q.device, q.dtype, impl)
    result: torch.Tensor = module.prefill_attention(q, window, entries, ending)
    return result


def prefill_attention_fp8(
    q: torch.Tensor,
    window: WindowKeys,
    entries: PoolKeys | None,
    *,
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    impl: str = AUTO,
) -> Fp8Rows:
    """`prefill_attention`, quantised for `wo_a` from the fp32 sums. Arguments and errors as there.

    Returns: E4M3 values [T, H * 512] with scales [T, H * 4].
    """
    ending = _checked(q, window, entries, Ending(sink, cis, scale))
    module = implementation("attention.prefill", q.device, q.dtype, impl)
    return Fp8Rows(*module.prefill_attention_fp8(q, window, entries, ending))


def _checked(q: torch.Tensor, window: WindowKeys, entries: PoolKeys | None, ending: Ending) -> Ending:
    check_queries(q, ending)
    num_tokens = q.shape[0]
    if window.rows.dtype != q.dtype or window.rows.dim() != 2 or window.rows.shape[1] != DIM:
        raise ValueError(f"window rows are {window.rows.dtype} {tuple(window.rows.shape)}, expected bf16 [N, {DIM}]")
    if tuple(window.begin.shape) != (num_tokens,) or tuple(window.end.shape) != (num_tokens,):
        raise ValueError(
            f"window ranges {tuple(window.begin.shape)}, {tuple(window.end.shape)} do not fit {num_tokens} tokens"
        )
    if entries is None:
        return ending
    check_pool(entries.pool)
    shape, counts = tuple(entries.slots.shape), entries.counts
    if len(shape) != 2 or shape[0] not in (1, num_tokens) or (counts is not None and counts.shape != (num_tokens,)):
        raise ValueError(f"slots {shape} or counts do not fit {num_tokens} tokens")
    return ending
