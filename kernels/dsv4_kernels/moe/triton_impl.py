"""The work list of grouped products in Triton, in one launch. The rest of the op is the reference's."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

from dsv4_kernels.moe.reference import grouped_experts, route_by_hash, route_by_score
from dsv4_kernels.moe.work_list import WorkList, max_tiles
from dsv4_kernels.triton_pdl import uses_ptx, wait_for_previous

__all__ = ["build_work_list", "grouped_experts", "route_by_hash", "route_by_score"]

_CHUNK = 4096  # pairs that a program looks at together
_TILES = 32  # tiles that a program writes together


def build_work_list(topk_ids: torch.Tensor, num_experts: int, first_expert: int, rows_per_tile: int) -> WorkList:
    ids = topk_ids.contiguous()
    num_pairs, limit = ids.numel(), max_tiles(ids.numel(), num_experts, rows_per_tile)

    def empty(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids.device)

    work = WorkList(
        pairs=empty(num_pairs), tile_expert=empty(limit), tile_first=empty(limit), tile_rows=empty(limit),
        num_tiles=empty(1) if num_pairs else torch.zeros(1, dtype=torch.int32, device=ids.device),
        topk=topk_ids.shape[1], rows_per_tile=rows_per_tile,
    )  # fmt: skip
    if num_pairs:
        _work_list_kernel[(num_experts + 1,)](
            ids, work.pairs, work.tile_expert, work.tile_first, work.tile_rows, work.num_tiles, num_pairs, limit,
            first_expert, num_experts, rows_per_tile=rows_per_tile, bins=triton.next_power_of_2(num_experts + 1),
            chunk=min(_CHUNK, triton.next_power_of_2(num_pairs)), tiles=_TILES,
            num_warps=4 if num_pairs <= 1024 else 8, use_ptx=uses_ptx(ids), launch_pdl=uses_ptx(ids),
        )  # fmt: skip
    return work


@triton.jit
def _work_list_kernel(
    ids_ptr, pairs_ptr, tile_expert_ptr, tile_first_ptr, tile_rows_ptr, num_tiles_ptr, num_pairs, max_num_tiles,
    first_expert, num_experts, rows_per_tile: tl.constexpr, bins: tl.constexpr, chunk: tl.constexpr,
    tiles: tl.constexpr, use_ptx: tl.constexpr,
):  # fmt: skip
    """One program per expert counts all pairs, then places its own; the last one fills what is behind the end.

    Reading every id in every program costs less than a second launch, and the order needs no atomics.
    """
    wait_for_previous(use_ptx)
    expert = tl.program_id(0)
    counts = tl.zeros((bins,), tl.int32)
    for start in range(0, num_pairs, chunk):
        counts += tl.histogram(_local_ids(ids_ptr, start, num_pairs, first_expert, num_experts, chunk), bins)
    bin_ = tl.arange(0, bins)
    counts = tl.where(bin_ < num_experts, counts, 0)
    num_before = tl.sum(tl.where(bin_ < expert, counts, 0), 0)
    tiles_before = tl.sum(tl.where(bin_ < expert, (counts + rows_per_tile - 1) // rows_per_tile, 0), 0)
    if expert < num_experts:
        num_rows = tl.sum(tl.where(bin_ == expert, counts, 0), 0)
        placed = num_before
        for start in range(0, num_pairs, chunk):
            mine = (_local_ids(ids_ptr, start, num_pairs, first_expert, num_experts, chunk) == expert).to(tl.int32)
            rank = tl.cumsum(mine, 0) - mine
            tl.store(pairs_ptr + placed + rank, start + tl.arange(0, chunk), mask=mine != 0)
            placed += tl.sum(mine, 0)
        num_tiles = (num_rows + rows_per_tile - 1) // rows_per_tile
        for start in range(0, num_tiles, tiles):
            tile = start + tl.arange(0, tiles)
            done = tile * rows_per_tile
            is_tile = tile < num_tiles
            tl.store(tile_expert_ptr + tiles_before + tile, expert, mask=is_tile)
            tl.store(tile_first_ptr + tiles_before + tile, num_before + done, mask=is_tile)
            tl.store(tile_rows_ptr + tiles_before + tile, tl.minimum(num_rows - done, rows_per_tile), mask=is_tile)
    else:
        tl.store(num_tiles_ptr, tiles_before)
        for start in range(num_before, num_pairs, chunk):
            pair = start + tl.arange(0, chunk)
            tl.store(pairs_ptr + pair, -1, mask=pair < num_pairs)
        for start in range(tiles_before, max_num_tiles, chunk):
            tile = start + tl.arange(0, chunk)
            behind = tile < max_num_tiles
            tl.store(tile_expert_ptr + tile, -1, mask=behind)
            tl.store(tile_first_ptr + tile, 0, mask=behind)
            tl.store(tile_rows_ptr + tile, 0, mask=behind)


@triton.jit
def _local_ids(ids_ptr, start, num_pairs, first_expert, num_experts, chunk: tl.constexpr):
    """[chunk] int32 in 0..num_experts; the last value stands for pairs that are routed nowhere here."""
    pair = start + tl.arange(0, chunk)
    ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
    local = (ids - first_expert).to(tl.int32)
    is_here = (ids >= 0) & (local >= 0) & (local < num_experts)
    return tl.where(is_here, local, num_experts)
