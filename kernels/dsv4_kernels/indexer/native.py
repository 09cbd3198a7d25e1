"""Indexer scores and selection in C; rotation is the reference's."""

import torch

from dsv4_kernels.indexer import reference
from dsv4_kernels.native import ops

_DIM_STEP = 32

hadamard = reference.hadamard
index_slots = reference.index_slots


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return ops.index_scores(q, keys, weights) if _fits(q, keys) else reference.index_scores(q, keys, weights)


def select_topk(scores: torch.Tensor, num_visible: torch.Tensor, topk: int) -> torch.Tensor:
    ids = num_visible.new_empty(scores.shape[0], min(topk, scores.shape[1]))
    ops.select_topk(scores, num_visible, ids)
    return ids


def index_topk(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, num_visible: torch.Tensor, topk: int, tile: int
) -> torch.Tensor:
    if not _fits(q, keys):
        return reference.index_topk(q, keys, weights, num_visible, topk, tile)
    ids = num_visible.new_empty(q.shape[0], min(topk, keys.shape[0]))
    scores = torch.empty(min(tile, q.shape[0]), keys.shape[0])  # of one tile after the other
    for first in range(0, q.shape[0], tile):
        rows = slice(first, min(first + tile, q.shape[0]))
        part = ops.index_scores(q[rows], keys, weights[rows], out=scores[: rows.stop - first])
        ops.select_topk(part, num_visible[rows], ids[rows])
    return ids


def _fits(q: torch.Tensor, keys: torch.Tensor) -> bool:
    return q.dtype == keys.dtype and q.shape[2] % _DIM_STEP == 0 and q.shape[2] * q.dtype.itemsize <= ops.MAX_HEAD_BYTES
