"""Public ops: sparse attention of decoding tokens, sink and counter-rotation included. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.attention.checks import check_pool, check_queries
from dsv4_kernels.attention.keys import Ending, PoolKeys
from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.quant import Fp8Rows

_MAX_POOLS = 2


def decode_attention(
    q: torch.Tensor,
    keys: Sequence[PoolKeys],
    *,
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    num_splits: int | None = None,
    impl: str = AUTO,
) -> torch.Tensor:
    """One softmax per token and head over the rows that its slots name in one or two pools.

    q: [T, H, 512] bf16, rotated; a token is a query, several of a sequence have a row of slots each. keys: window, and
    compressed rows if any, pools of one format, slots [T, K]. sink: [H] fp32 raw logits, or None. cis: [T, 32]
    complex64 of `rotations` of the queries' positions; the last 64 dims of the result are rotated back by them, None =
    they stay. num_splits: parts of the keys that are summed apart; None = as many as fill the GPU, which depends on T.
    Returns: [T, H, 512] bf16; zero for a token without keys. Batch-invariant where `num_splits` is given, otherwise
    for equal T only.
    Raises: ValueError when shapes, dtypes or formats do not fit.
    """
    ending = _checked(q, keys, Ending(sink, cis, scale), num_splits)
    module = implementation("attention.decode", q.device, q.dtype, impl)
    result: torch.Tensor = module.decode_attention(q, keys, ending, num_splits)
    return result


def decode_attention_fp8(
    q: torch.Tensor,
    keys: Sequence[PoolKeys],
    *,
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    num_splits: int | None = None,
    impl: str = AUTO,
) -> Fp8Rows:
    """`decode_attention`, quantised for `wo_a` from the fp32 sums. Arguments and errors as there.

    Returns: E4M3 values [T, H * 512] with scales [T, H * 4].
    """
    ending = _checked(q, keys, Ending(sink, cis, scale), num_splits)
    module = implementation("attention.decode", q.device, q.dtype, impl)
    return Fp8Rows(*module.decode_attention_fp8(q, keys, ending, num_splits))


def _checked(q: torch.Tensor, keys: Sequence[PoolKeys], ending: Ending, num_splits: int | None) -> Ending:
    check_queries(q, ending)
    if not 1 <= len(keys) <= _MAX_POOLS:
        raise ValueError(f"keys of {len(keys)} pools, expected 1 or {_MAX_POOLS}")
    for one in keys:
        check_pool(one.pool)
        if one.pool.format != keys[0].pool.format:
            raise ValueError(f"pools have formats {keys[0].pool.format} and {one.pool.format}, expected one")
        rows, count = one.slots, one.counts
        if rows.dim() != 2 or rows.shape[0] != q.shape[0] or (count is not None and count.shape != rows.shape[:1]):
            raise ValueError(f"slots {tuple(rows.shape)} or counts do not fit {q.shape[0]} tokens")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}, expected at least 1")
    return ending
