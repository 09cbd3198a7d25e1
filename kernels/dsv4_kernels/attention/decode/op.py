"""Public ops: sparse attention of decoding tokens, sink and counter-rotation included. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.attention.checks import check_pool, check_queries
from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.quant import Fp8Rows

_MAX_POOLS = 2


def decode_attention(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor | None],
    *,
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    scale: float,
    num_splits: int | None = None,
    impl: str = AUTO,
) -> torch.Tensor:
    """One softmax per token and head over the rows that its slots name in one or two pools.

    q: [T, H, 512] bf16, rotated; a token is a query, several of a sequence have a row of slots each. pools: window, and
    compressed if any, of one format; "kv_fp8" rows with 64 rotary values or plain bf16 rows. slots: per pool [T, K]
    int64; a negative one or one beyond the pool is none. counts: per pool [T] int64, columns from there on are none; or
    None. sink: [H] fp32 raw logits, or None. cis: [T, 32] complex64 of `rotations` of the queries' positions; the last
    64 dims of the result are rotated back by them, None = they stay.
    num_splits: parts of the keys that are summed apart; None = as many as fill the GPU, which depends on T.
    Returns: [T, H, 512] bf16; zero for a token without keys. Batch-invariant where `num_splits` is given, otherwise
    for equal T only.
    Raises: ValueError when shapes, dtypes or formats do not fit.
    """
    _check(q, pools, slots, counts, sink, cis, num_splits)
    module = implementation("attention.decode", q.device, q.dtype, impl)
    result: torch.Tensor = module.decode_attention(q, pools, slots, counts, sink, cis, scale, num_splits)
    return result


def decode_attention_fp8(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor | None],
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
    _check(q, pools, slots, counts, sink, cis, num_splits)
    module = implementation("attention.decode", q.device, q.dtype, impl)
    return Fp8Rows(*module.decode_attention_fp8(q, pools, slots, counts, sink, cis, scale, num_splits))


def _check(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor | None],
    sink: torch.Tensor | None,
    cis: torch.Tensor | None,
    num_splits: int | None,
) -> None:
    check_queries(q, sink, cis)
    if not 1 <= len(pools) <= _MAX_POOLS or len(slots) != len(pools) or len(counts) != len(pools):
        raise ValueError(f"{len(pools)} pools, {len(slots)} slots, {len(counts)} counts; expected 1 or 2 of each")
    for pool, rows, count in zip(pools, slots, counts, strict=True):
        check_pool(pool)
        if pool.format != pools[0].format:
            raise ValueError(f"pools have formats {pools[0].format} and {pool.format}, expected one")
        if rows.dim() != 2 or rows.shape[0] != q.shape[0] or (count is not None and count.shape != rows.shape[:1]):
            raise ValueError(f"slots {tuple(rows.shape)} or counts do not fit {q.shape[0]} tokens")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}, expected at least 1")
