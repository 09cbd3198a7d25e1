"""Indexer scores and exact top-k as the formulas. Source: spec 3.4, 4.5."""

from functools import cache

import torch

from dsv4_kernels.kv.rows import PagedRows

_INDEX_BITS = 32


@cache
def hadamard_matrix(dim: int) -> torch.Tensor:
    """Sylvester Hadamard matrix, orthonormal. Returns: [dim, dim] fp32 on CPU."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix * dim**-0.5


def hadamard(x: torch.Tensor) -> torch.Tensor:
    return (x.float() @ hadamard_matrix(x.shape[-1]).to(x.device)).to(x.dtype)


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = (q.float().flatten(0, 1) @ keys.float().T).relu_()  # [T * H, N]
    return torch.bmm(weights.unsqueeze(1), logits.view(*q.shape[:2], keys.shape[0])).squeeze(1)  # [T, N]


def select_topk(scores: torch.Tensor, num_visible: torch.Tensor, topk: int) -> torch.Tensor:
    num_entries = scores.shape[1]
    entry = torch.arange(num_entries, device=scores.device)
    # One integer key per entry, score first, then the lower entry: unique keys make any top-k exact and repeatable.
    key = _ordered_bits(scores).long().bitwise_left_shift_(_INDEX_BITS).add_(num_entries - entry)  # [T, N]
    key.masked_fill_(entry >= num_visible.unsqueeze(1), torch.iinfo(torch.int64).min)
    ids = key.topk(min(topk, num_entries), dim=1, sorted=False).indices  # [T, k]
    ids.masked_fill_(ids >= num_visible.unsqueeze(1), num_entries)
    ids = ids.sort(dim=1).values
    return ids.masked_fill_(ids == num_entries, -1)


def index_topk(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    tile: int,
) -> torch.Tensor:
    ids = num_visible.new_empty(q.shape[0], min(topk, keys.shape[0]))
    for first in range(0, q.shape[0], tile):
        rows = slice(first, first + tile)
        ids[rows] = select_topk(index_scores(q[rows], keys, weights[rows]), num_visible[rows], topk)
    return ids


def index_slots(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: PagedRows,
    page_table: torch.Tensor,
    seqs: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = num_visible.new_full((q.shape[0], topk), -1)
    row = torch.arange(pool.rows_per_page, device=q.device)
    for token, (seq, visible) in enumerate(zip(seqs.tolist(), num_visible.tolist(), strict=True)):
        if visible <= 0:
            continue
        entries = (page_table[seq].unsqueeze(1) * pool.rows_per_page + row).flatten()[:visible]
        scores = index_scores(q[token : token + 1], pool.gather(entries), weights[token : token + 1])
        ids = select_topk(scores, scores.new_full((1,), visible, dtype=torch.int64), topk)[0]
        slots[token, : ids.shape[0]] = entries[ids]
    return slots, (slots >= 0).sum(1, dtype=torch.int32)


def _ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """int32 that orders like the fp32 values; both zeros are equal."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
