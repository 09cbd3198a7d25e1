"""Attention where one latent row is both key and value, as the formula. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.attention.keys import BlockKeys
from dsv4_kernels.kv.rows import PagedRows


def paged_attention(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    sink: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    gathered = [pool.gather(rows) for pool, rows in zip(pools, slots, strict=True)]
    kv = torch.cat(gathered, dim=1).float()  # [T, K, dim]
    absent = torch.cat(list(slots), dim=1) < 0  # [T, K]
    logits = torch.bmm(q.float(), kv.transpose(1, 2)).mul_(scale)  # [T, H, K]
    logits.masked_fill_(absent.unsqueeze(1), float("-inf"))
    weights, denominator = _softmax_with_sink_(logits, sink)
    return (torch.bmm(_round(weights, q), kv) / denominator).to(q.dtype)


def masked_attention(
    q: torch.Tensor,
    kv: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    sink: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    num_tokens, num_heads, dim = q.shape
    flat = q.float().reshape(-1, dim)  # [T * H, dim]
    wide = [rows.float() for rows in kv]
    per_source = [
        (flat @ rows.T).view(num_tokens, num_heads, rows.shape[0])
        if rows.dim() == 2
        else torch.bmm(flat.view(q.shape), rows.transpose(1, 2))
        for rows in wide
    ]
    logits = torch.cat(per_source, dim=2).mul_(scale)  # [T, H, N]
    logits.masked_fill_(~torch.cat(list(masks), dim=1).unsqueeze(1), float("-inf"))
    weights, denominator = _softmax_with_sink_(logits, sink)
    parts = _round(weights, q).split([rows.shape[-2] for rows in wide], dim=2)
    out = torch.zeros_like(flat)
    for part, rows in zip(parts, wide, strict=True):
        if rows.dim() == 2:
            out.addmm_(part.flatten(0, 1), rows)
        else:
            out.view(q.shape).baddbmm_(part, rows)
    return (out.view(q.shape) / denominator).to(q.dtype)


def named_slots(pool: PagedRows, slots: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """slots: [T, K] int64. count: [T] or None. Returns: -1 from column `count` on and where the pool has no row."""
    is_row = (slots >= 0) & (slots < pool.num_pages * pool.rows_per_page)
    if count is not None:
        is_row &= torch.arange(slots.shape[1], device=slots.device) < count[:, None]
    return torch.where(is_row, slots, -1)


def _softmax_with_sink_(logits: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerators in place of `logits` and the denominator [T, H, 1]; the sink is a raw logit without a value."""
    if logits.shape[-1] == 0:
        return logits, logits.new_ones(*logits.shape[:2], 1)
    top = logits.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.view(1, -1, 1))
    top = top.clamp(min=torch.finfo(torch.float32).min)  # a query without any key: exp(-inf - finite) = 0, not NaN
    weights = logits.sub_(top).exp_()
    denominator = weights.sum(-1, keepdim=True)
    if sink is not None:
        denominator += torch.exp(sink.view(1, -1, 1) - top)
    return weights, denominator.clamp(min=torch.finfo(torch.float32).tiny)


def _round(weights: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Probabilities enter the value product in the compute dtype; the product accumulates in fp32."""
    return weights.to(q.dtype).float()


def block_attention(q: torch.Tensor, keys: BlockKeys, sink: torch.Tensor | None, scale: float) -> torch.Tensor:
    out = torch.empty_like(q)
    for block, first in enumerate(range(0, q.shape[0], keys.block_tokens)):
        tokens = slice(first, first + keys.block_tokens)
        position = keys.positions[tokens].unsqueeze(1)
        ids = keys.window_ids[block]
        column = keys.window_first[block] + torch.arange(ids.shape[0], device=q.device)
        kv = [keys.window_rows[ids.clamp(min=0)].masked_fill((ids < 0).unsqueeze(1), 0.0)]
        masks = [(ids >= 0) & (column <= position) & (column > position - keys.window)]
        if keys.entry_rows is not None and keys.entry_ids is not None and keys.num_visible is not None:
            ids = keys.entry_ids if keys.entry_ids.dim() == 1 else keys.entry_ids[block]
            column = torch.arange(ids.shape[0], device=q.device)
            kv.append(keys.entry_rows[ids.clamp(min=0)].masked_fill((ids < 0).unsqueeze(1), 0.0))
            masks.append((ids >= 0) & (column < keys.num_visible[tokens].unsqueeze(1)))
        out[tokens] = masked_attention(q[tokens], kv, masks, sink, scale)
    return out
