"""Argument checks that decode and prefill attention share."""

import torch

from dsv4_kernels.attention.keys import Ending
from dsv4_kernels.kv.rows import PagedRows

DIM, ROPE = 512, 64
OUT_GROUP = 128  # values of an FP8 result per scale


def check_queries(q: torch.Tensor, ending: Ending) -> None:
    """Raises: ValueError unless q is [T, H, 512] bf16, and the ending's sink [H] and cis [T, 32]."""
    sink, cis = ending.sink, ending.cis
    if q.dtype != torch.bfloat16 or q.dim() != 3 or q.shape[2] != DIM:
        raise ValueError(f"q is {q.dtype} {tuple(q.shape)}, expected bf16 [T, H, {DIM}]")
    if sink is not None and tuple(sink.shape) != (q.shape[1],):
        raise ValueError(f"sink has shape {tuple(sink.shape)}, expected ({q.shape[1]},)")
    if cis is not None and tuple(cis.shape) != (q.shape[0], ROPE // 2):
        raise ValueError(f"rotations have shape {tuple(cis.shape)}, expected {(q.shape[0], ROPE // 2)}")


def check_pool(pool: PagedRows) -> None:
    """Raises: ValueError unless the pool's rows are 512 values in "kv_fp8" or in plain bf16."""
    fmt = pool.format
    is_fp8 = fmt.kind == "kv_fp8" and fmt.rope_dim == ROPE
    if fmt.dim != DIM or not (is_fp8 or (fmt.kind == "plain" and fmt.dtype == torch.bfloat16)):
        raise ValueError(f"pool has format {fmt}, expected kv_fp8 or plain bf16 rows of {DIM}")
