"""Attention over blocks of queries in C; the other forms are the reference's."""

import torch

from dsv4_kernels.attention import reference
from dsv4_kernels.attention.keys import BlockKeys
from dsv4_kernels.native import ops

paged_attention = reference.paged_attention
masked_attention = reference.masked_attention

_DIM_STEP = 32  # dims per step of the value product


def block_attention(q: torch.Tensor, keys: BlockKeys, sink: torch.Tensor | None, scale: float) -> torch.Tensor:
    if q.shape[2] % _DIM_STEP or q.shape[2] * q.dtype.itemsize > ops.MAX_HEAD_BYTES or q.shape[0] == 0:
        return reference.block_attention(q, keys, sink, scale)
    return ops.attention(q, keys, sink, scale)
