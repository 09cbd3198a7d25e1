"""What a handoff weighs equals the published figures. Source: spec 6.5."""

import pytest
import torch

from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.snapshot import live_segment_shapes
from dsv4_cluster.tools.presets import preset_config

FIXED = {  # window KV, CSA + indexer rows at n mod 4 = 0, HCA rows per token of the unfinished block
    "flash": (3_289_088, 860_160, 81_920),
    "pro": (4_634_624, 1_228_800, 126_976),
}
PROPORTIONAL = {"flash": 3_850.25, "pro": 5_511.4375}
LAST_HIDDEN = {"flash": 32_768, "pro": 57_344}
ROW_BYTES = 584  # of one window row in fp8
TOTAL_MB = {("flash", 4_096): 19.95, ("flash", 131_072): 508.8, ("pro", 4_096): 28.5, ("pro", 131_072): 728.3}


def layout_of(model: str, num_mtp_layers: int = 1) -> KVLayout:
    kv = KVConfig(kv_cache_dtype="fp8", indexer_dtype="fp8")
    return KVLayout.build(
        preset_config(model), kv, torch.bfloat16, num_mtp_layers=num_mtp_layers, fingerprint="weights"
    )


def num_bytes(layout: KVLayout, num_tokens: int, *pools: str) -> int:
    return sum(s.num_bytes for s in live_segment_shapes(layout, num_tokens) if not pools or s.pool in pools)


@pytest.fixture(params=FIXED)
def model(request) -> str:
    return request.param


def test_entries_grow_by_the_published_bytes_per_token(model):
    layout = layout_of(model)

    for num_tokens in (128, 4_096, 131_072):
        assert num_bytes(layout, num_tokens, "compressed", "indexer") == num_tokens * PROPORTIONAL[model]


def test_window_rows_are_fixed(model):
    layout = layout_of(model)

    # The published figure counts the MTP row of the last token, which depends on the next one and is not restored.
    assert {num_bytes(layout, n, "window") for n in (128, 129, 4_096)} == {FIXED[model][0] - ROW_BYTES}
    assert num_bytes(layout, 5, "window") == FIXED[model][0] * 5 // 128 - ROW_BYTES


def test_window_without_mtp_leaves_one_layer_out():
    assert num_bytes(layout_of("flash", num_mtp_layers=0), 128, "window") == 43 * 128 * ROW_BYTES
    assert num_bytes(layout_of("flash"), 128, "window") == (43 * 128 + 127) * ROW_BYTES


def test_the_last_token_s_streams_travel_with_an_mtp_layer_only(model):
    assert {num_bytes(layout_of(model), n, "last_hidden") for n in (1, 128, 4_097)} == {LAST_HIDDEN[model]}
    assert num_bytes(layout_of(model, num_mtp_layers=0), 128, "last_hidden") == 0


def test_state_of_a_finished_block_is_the_previous_csa_block(model):
    assert num_bytes(layout_of(model), 4_096, "state") == FIXED[model][1]


@pytest.mark.parametrize("rest", [1, 2, 3, 4, 5, 127])
def test_state_grows_with_the_unfinished_blocks(model, rest):
    _, csa_rows, hca_row = FIXED[model]

    assert num_bytes(layout_of(model), 4_096 + rest, "state") == csa_rows * (4 + rest % 4) // 4 + hca_row * rest


@pytest.mark.parametrize("num_tokens", [4_096, 131_072])
def test_whole_handoff_has_the_published_size(model, num_tokens):
    total = num_bytes(layout_of(model), num_tokens)

    assert total / 1e6 == pytest.approx(TOTAL_MB[model, num_tokens], abs=0.06)


def test_a_handoff_has_about_a_hundred_segments():
    flash = layout_of("flash")

    # Window as two runs, main and MTP; one of last_hidden; no HCA state rows at a multiple of 128.
    assert len(live_segment_shapes(flash, 4_096)) == 2 + 41 + 21 + 21 + 1
    assert len(live_segment_shapes(flash, 4_097)) == 2 + 41 + 21 + 41 + 1
