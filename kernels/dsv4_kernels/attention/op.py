"""Public attention ops; one latent row is key and value. Source: spec 4.3."""

from collections.abc import Sequence

import torch

from dsv4_kernels.attention import native, reference
from dsv4_kernels.attention.keys import BlockKeys
from dsv4_kernels.dispatch import AUTO, choose
from dsv4_kernels.kv.rows import PagedRows

_IMPLEMENTATIONS = {"reference": reference, "native": native}
_WORKSPACE_VALUES = 1 << 24  # gathered values or logits held at once: 64 MiB in fp32


def paged_attention(
    q: torch.Tensor,
    pools: Sequence[PagedRows],
    slots: Sequence[torch.Tensor],
    *,
    sink: torch.Tensor | None,
    scale: float,
    impl: str = AUTO,
) -> torch.Tensor:
    """One softmax per query and head over the rows that its slots name in every pool; tiled over queries.

    q: [T, H, dim], rotated. pools: e.g. window and compressed. slots: per pool [T, K] int64, -1 = none.
    sink: [H] fp32 raw logits, or None. Scores, softmax and accumulation are fp32.
    Returns: [T, H, dim] of q's dtype; zero for a query without keys. Raises: ValueError when shapes disagree.
    """
    _check(q, [rows.shape[0] for rows in slots], sink)
    module = _IMPLEMENTATIONS[choose("attention", q.device, q.dtype, impl)]
    tile = max(1, _WORKSPACE_VALUES // max(1, sum(rows.shape[1] for rows in slots) * q.shape[2]))
    if q.shape[0] <= tile:
        return module.paged_attention(q, pools, slots, sink, scale)
    out = torch.empty_like(q)
    for first in range(0, q.shape[0], tile):
        part = slice(first, first + tile)
        out[part] = module.paged_attention(q[part], pools, [rows[part] for rows in slots], sink, scale)
    return out


def masked_attention(
    q: torch.Tensor,
    kv: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    *,
    sink: torch.Tensor | None,
    scale: float,
    impl: str = AUTO,
) -> torch.Tensor:
    """The same softmax over dense rows, each query with its mask; for long chunks of one sequence.

    q: [T, H, dim], rotated. kv: per source [N, dim], shared by all queries, or [T, N, dim]; every row finite.
    masks: per source [T, N] bool, True = attend. sink: [H] fp32 raw logits, or None. The caller tiles: T * H * sum(N)
    logits are held at once.
    Returns: [T, H, dim] of q's dtype; zero for a query without keys. Raises: ValueError when shapes disagree.
    """
    _check(q, [mask.shape[0] for mask in masks], sink)
    module = _IMPLEMENTATIONS[choose("attention", q.device, q.dtype, impl)]
    return module.masked_attention(q, kv, masks, sink, scale)


def block_attention(
    q: torch.Tensor, keys: BlockKeys, *, sink: torch.Tensor | None, scale: float, impl: str = AUTO
) -> torch.Tensor:
    """The same softmax for queries in blocks, each block with its own list of rows.

    q: [T, H, dim], rotated. sink: [H] fp32 raw logits, or None.
    Returns: [T, H, dim] of q's dtype; natively a query's bits do not depend on its block.
    Raises: ValueError when shapes disagree.
    """
    num_blocks = -(-q.shape[0] // keys.block_tokens)
    if keys.window_ids.shape[0] != num_blocks or keys.window_first.shape[0] != num_blocks:
        raise ValueError(
            f"{num_blocks} blocks, but window lists {tuple(keys.window_ids.shape)}, {tuple(keys.window_first.shape)}"
        )
    _check(q, [keys.positions.shape[0]], sink)
    return _IMPLEMENTATIONS[choose("attention", q.device, q.dtype, impl)].block_attention(q, keys, sink, scale)


def _check(q: torch.Tensor, num_rows: list[int], sink: torch.Tensor | None) -> None:
    if any(rows != q.shape[0] for rows in num_rows):
        raise ValueError(f"slots or masks have {num_rows} rows, q has {q.shape[0]}")
    if sink is not None and tuple(sink.shape) != (q.shape[1],):
        raise ValueError(f"sink has shape {tuple(sink.shape)}, expected ({q.shape[1]},)")
