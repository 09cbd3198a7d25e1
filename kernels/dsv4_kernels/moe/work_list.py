"""The work list: which rows each tile of a grouped expert product covers, made and read on the device.

A pair is one (token, slot) of the routing, flat index token * topk + slot. Pairs are sorted by expert, within an expert
by index, without padding between experts. A tile is up to `rows_per_tile` consecutive pairs of one expert. All sizes
follow from shapes, so a list can be built inside a CUDA graph; how much of it is valid stands in it:

    pairs        | expert 3: pairs 0 5 | expert 7: pairs 1 2 8 9 11 | -1 -1   (two pairs are routed nowhere)
    rows_per_tile = 4: tiles (3, first 0, rows 2), (7, first 2, rows 4), (7, first 6, rows 1), then (-1, 0, 0)
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WorkList:
    """Tiles of a grouped product over experts. All tensors int32 on the device of the routing."""

    pairs: torch.Tensor  # [num_pairs], sorted by expert; -1 behind the routed ones
    tile_expert: torch.Tensor  # [max_tiles], -1 behind the last tile
    tile_first: torch.Tensor  # [max_tiles], position in `pairs` of the tile's first row; 0 behind the last tile
    tile_rows: torch.Tensor  # [max_tiles], 1..rows_per_tile; 0 behind the last tile
    num_tiles: torch.Tensor  # [1]
    topk: int
    rows_per_tile: int


def max_tiles(num_pairs: int, num_experts: int, rows_per_tile: int) -> int:
    """Tiles that the least favourable routing needs: every expert's last tile may hold a single row."""
    return min(num_pairs, num_pairs // rows_per_tile + num_experts)


def build_work_list(topk_ids: torch.Tensor, num_experts: int, first_expert: int, rows_per_tile: int) -> WorkList:
    """Reference of `moe.build_work_list`; no host sync, every shape is static."""
    device = topk_ids.device
    local = topk_ids.reshape(-1).long() - first_expert  # [P]
    is_here = (topk_ids.reshape(-1) >= 0) & (local >= 0) & (local < num_experts)
    expert = torch.where(is_here, local, num_experts)  # the rest sorts behind all experts
    ordered, pairs = expert.sort(stable=True)

    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))[:num_experts]
    first_pair = counts.cumsum(0) - counts
    tiles = -(-counts // rows_per_tile)
    last_tile = tiles.cumsum(0)

    tile = torch.arange(max_tiles(local.numel(), num_experts, rows_per_tile), device=device)
    owner = torch.searchsorted(last_tile, tile, right=True)
    is_tile = owner < num_experts
    owner = owner.clamp(max=num_experts - 1)
    done = (tile - (last_tile - tiles)[owner]) * rows_per_tile  # rows of the owner in its earlier tiles
    rows = (counts[owner] - done).clamp(max=rows_per_tile)
    return WorkList(
        pairs=torch.where(ordered < num_experts, pairs, -1).int(),
        tile_expert=torch.where(is_tile, owner, -1).int(),
        tile_first=torch.where(is_tile, first_pair[owner] + done, 0).int(),
        tile_rows=torch.where(is_tile, rows, 0).int(),
        num_tiles=last_tile[-1:].int(),
        topk=topk_ids.shape[1],
        rows_per_tile=rows_per_tile,
    )
