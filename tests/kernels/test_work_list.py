"""The work list of grouped products: sorted pairs, tiles that cover them once, and nothing for pairs routed nowhere."""

import pytest
import torch

from dsv4_kernels.dispatch import implementations
from dsv4_kernels.moe import build_work_list, max_tiles
from tests.kit.kernel_checks import assert_graph_replays, guarded_allocations, same_bits
from tests.kit.sm90a import recorded_launches

IMPLS = [name for name in implementations()["moe"] if name != "native"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 70])
@pytest.mark.parametrize(("num_experts", "first_expert"), [(8, 0), (3, 2)])
@pytest.mark.parametrize("rows_per_tile", [1, 16])
def test_tiles_cover_every_local_pair_once_in_order(
    triton_device, generator, impl, num_tokens, num_experts, first_expert, rows_per_tile
):
    ids = torch.randint(-1, 8, (num_tokens, 3), generator=generator)
    sizes = {"num_experts": num_experts, "first_expert": first_expert, "rows_per_tile": rows_per_tile}
    with guarded_allocations():
        work = build_work_list(ids.to(triton_device), **sizes, impl=impl)

    flat = ids.flatten().tolist()
    expected_pairs, tiles = [], []
    for expert in range(num_experts):
        mine = [pair for pair, e in enumerate(flat) if e == expert + first_expert]
        for start in range(0, len(mine), rows_per_tile):
            tiles.append((expert, len(expected_pairs) + start, len(mine[start : start + rows_per_tile])))
        expected_pairs += mine
    padding = [(-1, 0, 0)] * (max_tiles(len(flat), num_experts, rows_per_tile) - len(tiles))
    assert work.pairs.tolist() == expected_pairs + [-1] * (len(flat) - len(expected_pairs))
    columns = (work.tile_expert.tolist(), work.tile_first.tolist(), work.tile_rows.tolist())
    assert list(zip(*columns, strict=True)) == tiles + padding
    assert work.num_tiles.tolist() == [len(tiles)]
    assert all(t.dtype == torch.int32 for t in (work.pairs, work.tile_expert, work.tile_first, work.tile_rows))


@pytest.mark.parametrize("num_pairs", [6, 6144])
def test_the_work_list_compiles_for_hopper(num_pairs):
    with recorded_launches() as launches:
        ids = torch.empty(num_pairs // 6, 6, dtype=torch.int32, device="meta")
        build_work_list(ids, num_experts=256, rows_per_tile=16, impl="triton")

    launches[0].compile().assert_no_spills()


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(512, 256), (20000, 384)])
def test_the_work_list_at_real_sizes_and_in_a_graph(cuda, num_tokens, num_experts):
    generator = torch.Generator(device=cuda).manual_seed(0)
    first, second = (
        torch.randint(-1, num_experts, (num_tokens, 6), generator=generator, device=cuda, dtype=torch.int32)
        for _ in range(2)
    )

    def op(ids, impl="triton"):
        work = build_work_list(ids, num_experts=num_experts, rows_per_tile=16, impl=impl)
        return work.pairs, work.tile_expert, work.tile_first, work.tile_rows, work.num_tiles

    for left, right in zip(op(first), op(first, "reference"), strict=True):
        assert same_bits(left, right)
    assert_graph_replays(op, (first,), (second,))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_routing_to_nowhere_has_no_tiles(triton_device, impl):
    ids = torch.full((4, 2), -1, device=triton_device)

    work = build_work_list(ids, num_experts=8, rows_per_tile=16, impl=impl)

    assert work.num_tiles.tolist() == [0]
    assert (work.pairs == -1).all() and (work.tile_expert == -1).all() and (work.tile_rows == 0).all()
