"""Public op: sparse attention of decoding tokens, sink and counter-rotation included. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.kv.rows import PagedRows

_DIM, _ROPE = 512, 64
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
    compressed if any; "kv_fp8" rows with 64 rotary values or plain bf16 rows. slots: per pool [T, K] int64; a negative
    one or one beyond the pool is none. counts: per pool [T] int64, columns from there on are none; or None.
    sink: [H] fp32 raw logits, or None. cis: [T, 32] complex64 of `rotations` of the queries' positions; the last 64
    dims of the result are rotated back by them, None = they stay.
    num_splits: parts of the keys that are summed apart; None = as many as fill the GPU, which depends on T.
    Returns: [T, H, 512] bf16; zero for a token without keys. Batch-invariant where `num_splits` is given, otherwise
    for equal T only.
    Raises: ValueError when shapes, dtypes or formats do not fit.
    """
    if q.dtype != torch.bfloat16 or q.dim() != 3 or q.shape[2] != _DIM:
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)}, expected bf16 [T, H, {_DIM}]")
    if not 1 <= len(pools) <= _MAX_POOLS or len(slots) != len(pools) or len(counts) != len(pools):
        raise ValueError(f"{len(pools)} pools, {len(slots)} slots, {len(counts)} counts; expected 1 or 2 of each")
    for pool, rows, count in zip(pools, slots, counts, strict=True):
        _check_pool(pool)
        if rows.dim() != 2 or rows.shape[0] != q.shape[0] or (count is not None and count.shape != rows.shape[:1]):
            raise ValueError(f"slots {tuple(rows.shape)} or counts do not fit {q.shape[0]} tokens")
    if sink is not None and tuple(sink.shape) != (q.shape[1],):
        raise ValueError(f"sink has shape {tuple(sink.shape)}, expected ({q.shape[1]},)")
    if cis is not None and tuple(cis.shape) != (q.shape[0], _ROPE // 2):
        raise ValueError(f"rotations have shape {tuple(cis.shape)}, expected {(q.shape[0], _ROPE // 2)}")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}, expected at least 1")
    module = implementation("attention.decode", q.device, q.dtype, impl)
    result: torch.Tensor = module.decode_attention(q, pools, slots, counts, sink, cis, scale, num_splits)
    return result


def _check_pool(pool: PagedRows) -> None:
    fmt = pool.format
    is_fp8 = fmt.kind == "kv_fp8" and fmt.rope_dim == _ROPE
    if fmt.dim != _DIM or not (is_fp8 or (fmt.kind == "plain" and fmt.dtype == torch.bfloat16)):
        raise ValueError(f"pool has format {fmt}, expected kv_fp8 or plain bf16 rows of {_DIM}")
