"""Bytes of the shipped shapes and the identity of layouts. Source: spec 6.1 to 6.3."""

import pytest
import torch

from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.kv.layout import KVLayout, row_bytes
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.tools.presets import preset_config

FP8 = KVConfig(kv_cache_dtype="fp8", indexer_dtype="fp8")
FP4_INDEX = KVConfig(kv_cache_dtype="fp8", indexer_dtype="fp4")
MB = 1e6


def build(
    config: ModelConfig | str, kv: KVConfig = FP8, dtype=torch.bfloat16, num_mtp_layers=1, fingerprint="weights"
) -> KVLayout:
    config = preset_config(config) if isinstance(config, str) else config
    return KVLayout.build(config, kv, dtype, num_mtp_layers=num_mtp_layers, fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("model", "kv", "expected"),
    [
        ("flash", FP8, 3_850.25),
        ("flash", FP4_INDEX, 3_514.25),
        ("pro", FP8, 5_511.4375),
        ("pro", FP4_INDEX, 5_031.4375),
    ],
)
def test_growth_per_token_equals_the_published_figure(model, kv, expected):
    assert build(model, kv).bytes_per_token == expected


@pytest.mark.parametrize(("model", "num_csa", "num_hca", "num_swa"), [("flash", 21, 20, 3), ("pro", 30, 31, 1)])
def test_layers_follow_compress_ratios(model, num_csa, num_hca, num_swa):
    ratios = [layer.ratio for layer in build(model).layers]

    assert (ratios.count(4), ratios.count(128), ratios.count(0)) == (num_csa, num_hca, num_swa)
    assert ratios[-1] == 0  # the MTP layer has its own entry


@pytest.mark.parametrize(("model", "num_csa", "num_hca"), [("flash", 21, 20), ("pro", 30, 31)])
def test_page_bytes_equal_the_published_pages(model, num_csa, num_hca):
    assert build(model).page_bytes == num_csa * (37_440 + 8_448) + num_hca * 1_728


def test_state_rings_have_the_published_minimum_sizes():
    layout = build("flash", KVConfig(kv_cache_dtype="fp8", indexer_dtype="fp8", speculation_headroom=0))
    csa, hca = layout.layers[2], layout.layers[3]

    assert layout.state_ring(csa) * row_bytes(csa.state) == 65_536
    assert layout.state_ring(csa) * row_bytes(csa.indexer_state) == 16_384
    assert layout.state_ring(hca) * row_bytes(hca.state) == 524_288
    assert layout.window_ring == 129


def test_headroom_lengthens_every_ring():
    layout = build("flash", KVConfig(speculation_headroom=8))

    assert [layout.state_ring(layout.layers[i]) for i in (2, 3)] == [16, 136]
    assert layout.window_ring == 128 + 8 + 1
    assert layout.hidden_ring == 8 + 1


@pytest.mark.parametrize(
    ("model", "context", "total_mb"),
    [
        ("flash", 4_096, 31.3),
        ("flash", 131_072, 520.2),
        ("flash", 1_048_576, 4_052.8),
        ("pro", 4_096, 45.9),
        ("pro", 131_072, 745.7),
        ("pro", 1_048_576, 5_802.5),
    ],
)
def test_sequence_total_equals_the_published_one(model, context, total_mb):
    layout = build(model, KVConfig(kv_cache_dtype="fp8", indexer_dtype="fp8", speculation_headroom=0))
    window = sum(128 * row_bytes(layer.window) for layer in layout.layers)
    state = sum(layout.state_ring(layer) * row_bytes(fmt) for layer in layout.layers for fmt in layer.formats("state"))

    total = context * layout.bytes_per_token + window + state

    assert total / MB == pytest.approx(total_mb, abs=0.06)  # the source rounds to 0.1


@pytest.mark.parametrize("kv", [KVConfig(), FP8, FP4_INDEX], ids=["auto", "fp8", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_memory_summary_equals_the_allocated_bytes(kv, dtype):
    layout = build("toy", kv, dtype)

    pools = KVPools.allocate(layout, 3, 2, "cpu")

    rows = [
        r
        for cache in pools.layer_caches
        for r in (cache.window, cache.compressed, cache.indexer, cache.state, cache.indexer_state, cache.hidden)
        if r is not None
    ]
    assert sum(r.num_bytes for r in rows) == pools.num_bytes == 3 * layout.page_bytes + 2 * layout.seq_slot_bytes


def test_auto_stores_rows_in_the_compute_dtype():
    layer = build("flash", KVConfig(), torch.bfloat16).layers[2]

    assert (layer.compressed.kind, layer.compressed.dtype, row_bytes(layer.compressed)) == (
        "plain",
        torch.bfloat16,
        1024,
    )
    assert (layer.indexer.kind, layer.indexer.dtype) == ("plain", torch.bfloat16)
    assert (layer.state.dtype, layer.indexer_state.dtype) == (torch.float32, torch.float32)


def test_layout_id_is_stable_across_builds():
    assert build("flash").layout_id == build("flash").layout_id


@pytest.mark.parametrize(
    "other",
    [
        lambda: build("toy", KVConfig(kv_cache_dtype="fp8", indexer_dtype="fp8", speculation_headroom=3)),
        lambda: build("toy", KVConfig(kv_cache_dtype="fp8", indexer_dtype="fp8", num_pages=7)),
    ],
    ids=["headroom", "num_pages"],
)
def test_layout_id_ignores_what_does_not_travel(other):
    assert other().layout_id == build("toy").layout_id


def test_layout_id_ignores_the_dtype_that_quantised_rows_are_gathered_in():
    ids = {build("toy", dtype=dtype, num_mtp_layers=0).layout_id for dtype in (torch.float32, torch.bfloat16)}

    assert len(ids) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: build("toy", fingerprint="other weights"),
        lambda: build("toy", dtype=torch.float32),
        lambda: build("toy", num_mtp_layers=0),
        lambda: build("toy", FP4_INDEX),
        lambda: build("toy", KVConfig(kv_cache_dtype="fp8")),
        lambda: build("toy", KVConfig(indexer_dtype="fp8")),
        lambda: build("tiny"),
        lambda: build(preset_config("toy").model_copy(update={"sliding_window": 64})),
        lambda: build(preset_config("toy").model_copy(update={"compress_ratios": (0, 0, 4, 4, 4, 128, 0)})),
    ],
    ids=["fingerprint", "hidden dtype", "mtp", "fp4 index", "plain index", "plain rows", "dims", "window", "ratios"],
)
def test_layout_id_tells_payloads_apart(other):
    assert other().layout_id != build("toy").layout_id


def test_layout_id_tells_plain_dtypes_apart():
    assert build("toy", KVConfig(), torch.float32).layout_id != build("toy", KVConfig(), torch.bfloat16).layout_id
