"""Live bytes move to any other place bitwise, and nothing around them changes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.errors import KVTransferError, SegmentCorruptError
from dsv4_cluster.kv.layout import KVLayout, LayerLayout
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.kv.snapshot import LiveSegment, export_live, import_live, live_segment_shapes
from dsv4_cluster.tools.presets import preset_config
from dsv4_kernels.kv.rows import PagedRows

PRECISIONS = {"auto": ("auto", "auto"), "fp8": ("fp8", "fp8"), "fp4": ("fp8", "fp4")}
# n mod 4 in 0..3, n mod 128 in 0, 1, 127, below one block, below and above the rings of 137 and 136 rows, several pages
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 126, 127, 128, 129, 130, 136, 137, 138, 255, 256, 257, 383, 384, 385, 1023, 1025]


def build_layout(precision: str = "fp8", *, headroom: int = 8, num_mtp_layers: int = 1) -> KVLayout:
    kv_dtype, indexer_dtype = PRECISIONS[precision]
    kv = KVConfig(kv_cache_dtype=kv_dtype, indexer_dtype=indexer_dtype, speculation_headroom=headroom)
    return KVLayout.build(
        preset_config("toy"), kv, torch.bfloat16, num_mtp_layers=num_mtp_layers, fingerprint="weights"
    )


def all_rows(pools: KVPools) -> Iterator[tuple[int, str, PagedRows]]:
    for layer_id, cache in enumerate(pools.layer_caches):
        for name in ("window", "compressed", "indexer", "state", "indexer_state", "hidden"):
            if (rows := getattr(cache, name)) is not None:
                yield layer_id, name, rows


def noisy_pools(layout: KVLayout, num_pages: int, num_slots: int, seed: int) -> KVPools:
    """Pools in which every byte, padding included, is random: bit patterns that are NaN must travel as well."""
    pools = KVPools.allocate(layout, num_pages, num_slots, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for _, _, rows in all_rows(pools):
        rows.pages.copy_(torch.randint(0, 256, rows.pages.shape, dtype=torch.uint8, generator=generator))
    return pools


def copy_of_bytes(pools: KVPools) -> list[torch.Tensor]:
    return [rows.pages.clone() for _, _, rows in all_rows(pools)]


def assert_unchanged(pools: KVPools, before: list[torch.Tensor]) -> None:
    for (layer_id, name, rows), old in zip(all_rows(pools), before, strict=True):
        assert torch.equal(rows.pages, old), f"layer {layer_id} {name}"


def live_slots(name: str, layer: LayerLayout, rows: PagedRows, page_ids: list[int], slot: int, n: int) -> list[int]:
    """The rule of spec 6.5, row by row; the MTP row of the last token is not restored."""
    ratio = layer.ratio
    if name == "window":
        positions = [t for t in range(n) if n - 128 <= t and (t < n - 1 or not layer.is_mtp)]
    elif name == "hidden":
        positions = [n - 1]
    elif name in ("state", "indexer_state"):
        unfinished = n // ratio
        blocks = {unfinished, unfinished - 1} if ratio == 4 else {unfinished}
        positions = [t for t in range(n) if t // ratio in blocks]
    else:
        return [page_ids[w * ratio // 256] * rows.rows_per_page + w % rows.rows_per_page for w in range(n // ratio)]
    return [slot * rows.rows_per_page + t % rows.rows_per_page for t in positions]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("n", LENGTHS)
def test_live_rows_arrive_bitwise_and_neighbours_stay(precision, n):
    source = noisy_pools(build_layout(precision), 8, 3, seed=1)
    target = noisy_pools(build_layout(precision, headroom=3), 11, 5, seed=2)
    source_pages, target_pages = [6, 1, 3, 0, 7], [2, 10, 5, 8, 4, 9]
    expected = copy_of_bytes(target)
    for (layer_id, name, rows), memory, (_, _, theirs) in zip(
        all_rows(source), expected, all_rows(target), strict=True
    ):
        layer = source.layout.layers[layer_id]
        mirror = PagedRows(theirs.format, memory, theirs.rows_per_page)
        mirror.write_raw(
            torch.tensor(live_slots(name, layer, theirs, target_pages, 4, n), dtype=torch.int64),
            rows.read_raw(torch.tensor(live_slots(name, layer, rows, source_pages, 1, n), dtype=torch.int64)),
        )

    segments = export_live(source, source_pages, 1, n)
    import_live(target, target_pages, 4, n, segments)

    assert_unchanged(target, expected)


@pytest.mark.parametrize("n", [3, 127, 128, 1025])
def test_segments_look_as_the_receiver_expects(n):
    layout = build_layout()
    pools = noisy_pools(layout, 8, 3, seed=1)

    segments = export_live(pools, [0, 1, 2, 3, 4], 0, n)

    found = [(s.pool, s.layer_start, s.layer_end, s.num_rows, s.data.numel()) for s in segments]
    assert found == live_segment_shapes(layout, n)
    assert all(s.data.dtype == torch.uint8 and s.data.dim() == 1 and s.data.is_contiguous() for s in segments)
    assert all(s.num_bytes > 0 for s in live_segment_shapes(layout, n))


def test_an_export_is_a_copy():
    pools = noisy_pools(build_layout(), 2, 1, seed=1)
    segments = export_live(pools, [0, 1], 0, 300)
    before = [s.data.clone() for s in segments]

    for _, _, rows in all_rows(pools):
        rows.pages.zero_()

    assert all(torch.equal(s.data, old) for s, old in zip(segments, before, strict=True))


def test_no_tokens_have_no_segments():
    pools = noisy_pools(build_layout(), 2, 1, seed=1)
    before = copy_of_bytes(pools)

    import_live(pools, [], 0, 0, export_live(pools, [], 0, 0))

    assert live_segment_shapes(pools.layout, 0) == []
    assert_unchanged(pools, before)


BAD_SEGMENTS = {
    "one missing": (KVTransferError, lambda s: s[:-1]),
    "one too many": (KVTransferError, lambda s: [*s, s[-1]]),
    "none": (KVTransferError, lambda s: []),
    "swapped": (KVTransferError, lambda s: [*s[:-2], s[-1], s[-2]]),
    "other pool": (KVTransferError, lambda s: [*s[:-1], replace(s[-1], pool="window")]),
    "other layer": (KVTransferError, lambda s: [*s[:-1], replace(s[-1], layer_start=0)]),
    "other count": (KVTransferError, lambda s: [*s[:-1], replace(s[-1], num_rows=s[-1].num_rows - 1)]),
    "short": (SegmentCorruptError, lambda s: [*s[:-1], replace(s[-1], data=s[-1].data[:-1])]),
    "long": (SegmentCorruptError, lambda s: [*s[:-1], replace(s[-1], data=s[-1].data.repeat(2))]),
    "not bytes": (SegmentCorruptError, lambda s: [*s[:-1], replace(s[-1], data=s[-1].data.view(torch.int32))]),
    "not flat": (SegmentCorruptError, lambda s: [*s[:-1], replace(s[-1], data=s[-1].data.view(1, -1))]),
}


@pytest.mark.parametrize("case", BAD_SEGMENTS)
def test_bad_segments_are_refused_and_change_nothing(case):
    error, damage = BAD_SEGMENTS[case]
    pools = noisy_pools(build_layout(), 3, 2, seed=1)
    segments = export_live(pools, [0], 0, 131)
    before = copy_of_bytes(pools)

    with pytest.raises(error):
        import_live(pools, [1], 1, 131, damage(segments))

    assert_unchanged(pools, before)


@pytest.mark.parametrize("other", [129, 130, 132, 3])
def test_segments_of_another_length_are_refused(other):
    pools = noisy_pools(build_layout(), 3, 2, seed=1)
    segments = export_live(pools, [0], 0, 131)
    before = copy_of_bytes(pools)

    with pytest.raises(KVTransferError):
        import_live(pools, [1], 1, other, segments)

    assert_unchanged(pools, before)


def test_segments_with_mtp_rows_are_refused_without_an_mtp_layer():
    source = noisy_pools(build_layout(), 1, 1, seed=1)
    target = noisy_pools(build_layout(num_mtp_layers=0), 1, 1, seed=2)
    before = copy_of_bytes(target)

    with pytest.raises(KVTransferError):
        import_live(target, [0], 0, 64, export_live(source, [0], 0, 64))

    assert_unchanged(target, before)


def test_segments_may_be_slices_of_one_unaligned_payload():
    source = noisy_pools(build_layout("fp4"), 2, 1, seed=1)
    target = noisy_pools(build_layout("fp4"), 2, 1, seed=2)
    segments = export_live(source, [0, 1], 0, 301)
    payload = torch.cat([torch.zeros(1, dtype=torch.uint8), *(s.data for s in segments)])
    sliced: list[LiveSegment] = []
    offset = 1
    for s in segments:
        sliced.append(replace(s, data=payload[offset : offset + s.data.numel()]))
        offset += s.data.numel()

    import_live(target, [0, 1], 0, 301, sliced)

    again = export_live(target, [0, 1], 0, 301)
    assert all(torch.equal(a.data, b.data) for a, b in zip(segments, again, strict=True))
