"""Attention over blocks of queries in C; the other forms are the reference's."""

import torch

from dsv4_kernels.attention import reference
from dsv4_kernels.native import ops

paged_attention = reference.paged_attention
masked_attention = reference.masked_attention

_DIM_STEP = 32  # dims per step of the value product


def block_attention(
    q: torch.Tensor,
    block_tokens: int,
    positions: torch.Tensor,
    num_visible: torch.Tensor | None,
    window_rows: torch.Tensor,
    window_ids: torch.Tensor,
    window_first: torch.Tensor,
    entry_rows: torch.Tensor | None,
    entry_ids: torch.Tensor | None,
    window: int,
    sink: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    if q.shape[2] % _DIM_STEP or q.shape[2] * q.dtype.itemsize > ops.MAX_HEAD_BYTES or q.shape[0] == 0:
        implementation = reference.block_attention
    else:
        implementation = ops.attention
    return implementation(
        q, block_tokens, positions, num_visible, window_rows, window_ids, window_first, entry_rows, entry_ids, window,
        sink, scale,
    )  # fmt: skip
