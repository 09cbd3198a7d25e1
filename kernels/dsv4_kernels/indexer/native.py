"""Indexer scores in C; selection and rotation are the reference's."""

import torch

from dsv4_kernels.indexer import reference
from dsv4_kernels.native import ops

_DIM_STEP = 32

hadamard = reference.hadamard
select_topk = reference.select_topk


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if q.dtype != keys.dtype or q.shape[2] % _DIM_STEP or q.shape[2] * q.dtype.itemsize > ops.MAX_HEAD_BYTES:
        return reference.index_scores(q, keys, weights)
    return ops.index_scores(q, keys, weights)


def index_topk(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, num_visible: torch.Tensor, topk: int, tile: int
) -> torch.Tensor:
    return reference.index_topk(q, keys, weights, num_visible, topk, tile, scores=index_scores)
