"""Page tables and flat slots."""

import pytest
import torch

from dsv4_cluster.kv.page_table import num_pages_for, page_table_rows, paged_slots, ring_slots


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (256, 1), (257, 2), (1_048_576, 4096)])
def test_a_page_holds_256_tokens(num_tokens, num_pages):
    assert num_pages_for(num_tokens) == num_pages


def test_page_table_is_padded_with_minus_one():
    table = page_table_rows([[5, 3], [], [7, 1, 0]], "cpu")

    assert table.dtype == torch.int64
    assert table.tolist() == [[5, 3, -1], [-1, -1, -1], [7, 1, 0]]


def test_page_table_of_no_sequences_is_empty():
    assert page_table_rows([], "cpu").shape == (0, 0)
    assert page_table_rows([[], []], "cpu").shape == (2, 0)


def test_paged_slots_follow_the_page_ids():
    slots = paged_slots([4, 9], 1, 4, 2, "cpu")

    assert slots.tolist() == [4 * 2 + 1, 9 * 2, 9 * 2 + 1]
    assert paged_slots([], 0, 0, 2, "cpu").tolist() == []


def test_ring_slots_wrap_within_the_sequence_slot():
    assert ring_slots(3, 8, 12, 10, "cpu").tolist() == [38, 39, 30, 31]


def test_ring_slots_refuse_to_overwrite_themselves():
    with pytest.raises(AssertionError, match=r"0\.\.11 do not fit a ring of 10"):
        ring_slots(0, 0, 11, 10, "cpu")
