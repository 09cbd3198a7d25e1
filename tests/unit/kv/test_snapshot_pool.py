"""A snapshot holds exactly the live ring rows of a boundary, bit for bit."""

import pytest
import torch

from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.kv.snapshot import RING_POOLS, export_live
from dsv4_cluster.kv.snapshot_pool import SnapshotPool
from dsv4_cluster.tools.presets import preset_config


def noisy_pools(kv_cache_dtype: str, seed: int) -> KVPools:
    kv = KVConfig(kv_cache_dtype=kv_cache_dtype)
    layout = KVLayout.build(preset_config("toy"), kv, torch.bfloat16, num_mtp_layers=1, fingerprint="weights")
    pools = KVPools.allocate(layout, 4, 3, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for rows in all_rows(pools):
        rows.pages.copy_(torch.randint(0, 256, rows.pages.shape, dtype=torch.uint8, generator=generator))
    return pools


def all_rows(pools: KVPools):
    for cache in pools.layer_caches:
        for rows in (cache.window, cache.compressed, cache.indexer, cache.state, cache.indexer_state, cache.hidden):
            if rows is not None:
                yield rows


def ring_bytes(pools: KVPools, slot: int, num_tokens: int, *names: str) -> list[torch.Tensor]:
    segments = export_live(pools, [0, 1, 2, 3], slot, num_tokens)
    return [segment.data for segment in segments if segment.pool in (names or RING_POOLS)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("num_tokens", [128, 256, 384, 1024])
@pytest.mark.parametrize("is_spilled", [False, True])
def test_a_boundary_moves_to_another_slot_bitwise_and_neighbours_stay(kv_cache_dtype, num_tokens, is_spilled):
    pools = noisy_pools(kv_cache_dtype, seed=1)
    snapshots = SnapshotPool(pools, 2)
    source = ring_bytes(pools, 1, num_tokens)
    snapshots.save(1, 1, num_tokens)
    for rows in all_rows(pools):
        rows.pages.fill_(7)

    if is_spilled:
        snapshots.load_bytes(snapshots.read_bytes(1), 2, num_tokens)
    else:
        snapshots.load(1, 2, num_tokens)

    assert all(map(torch.equal, ring_bytes(pools, 2, num_tokens), source))
    for rows in all_rows(pools):
        others = rows.pages[:2] if rows.num_pages == 3 else rows.pages  # rings have one page per slot
        assert bool((others == 7).all())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_windows_and_states_lie_in_rows_of_their_own(kv_cache_dtype):
    pools = noisy_pools(kv_cache_dtype, seed=2)
    snapshots = SnapshotPool(pools, 3)

    snapshots.save(1, 0, 256)

    for kept, num_bytes, names in (
        (snapshots.windows, snapshots.row_bytes.window, ("window",)),
        (snapshots.states, snapshots.row_bytes.state, ("state", "last_hidden")),
    ):
        live = torch.cat(ring_bytes(pools, 0, 256, *names))
        assert kept.shape == (3, num_bytes) and num_bytes % 16 == 0
        assert live.numel() <= num_bytes < live.numel() + 16
        assert torch.equal(kept[1, : live.numel()].sort().values, live.sort().values)  # order is the pool's own
