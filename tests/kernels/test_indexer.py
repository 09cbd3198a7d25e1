"""Indexer: Hadamard rotation, scores as the formula, exact top-k with ties to the lower entry."""

import pytest
import torch

from dsv4_kernels.indexer import hadamard, index_scores, index_topk, op, select_topk


def _inputs(num_tokens, num_entries, seed, heads=16, dim=32):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_tokens, heads, dim, generator=generator)
    keys = torch.randn(num_entries, dim, generator=generator)
    return q, keys, torch.randn(num_tokens, heads, generator=generator)


def _expected_ids(scores, num_visible, topk):
    """Per row the set of entries, by a full sort on (score descending, entry ascending)."""
    return [
        set(sorted(range(int(n)), key=lambda w, row=row: (-float(row[w]), w))[:topk])
        for row, n in zip(scores, num_visible, strict=True)
    ]


def test_hadamard_is_orthonormal_and_in_sylvester_order():
    matrix = hadamard(torch.eye(128))

    torch.testing.assert_close(matrix @ matrix.T, torch.eye(128), atol=1e-6, rtol=0)
    for row, column in ((0, 0), (5, 3), (127, 127), (64, 65)):
        sign = -1 if (row & column).bit_count() % 2 else 1
        assert matrix[row, column].item() == pytest.approx(sign * 128**-0.5)


def test_rotating_both_sides_leaves_products_unchanged():
    q, keys, weights = _inputs(4, 9, 0, dim=128)

    rotated = index_scores(hadamard(q), hadamard(keys), weights)

    torch.testing.assert_close(rotated, index_scores(q, keys, weights), atol=1e-3, rtol=1e-4)
    with pytest.raises(ValueError, match="96 is not a power of two"):
        hadamard(torch.zeros(1, 96))


def test_scores_are_the_weighted_sum_of_rectified_products():
    q, keys, weights = _inputs(3, 7, 1)

    expected = (weights[:, :, None] * (q @ keys.T).relu()).sum(1)

    assert (weights < 0).any()  # negative head weights count
    torch.testing.assert_close(index_scores(q, keys, weights), expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
@pytest.mark.parametrize(("num_entries", "topk"), [(0, 4), (1, 4), (4, 4), (5, 4), (63, 8), (64, 8), (65, 8)])
def test_topk_selects_exactly_the_best_visible_entries(num_tokens, num_entries, topk):
    q, keys, weights = _inputs(num_tokens, num_entries, 100 * num_entries + num_tokens)
    num_visible = torch.arange(num_tokens) * num_entries // max(1, num_tokens - 1)

    ids = index_topk(q, keys, weights, num_visible, topk)

    assert ids.shape == (num_tokens, min(topk, num_entries))
    expected = _expected_ids(index_scores(q, keys, weights), num_visible, topk)
    for row, best in zip(ids.tolist(), expected, strict=True):
        chosen = [w for w in row if w >= 0]
        assert set(chosen) == best and len(chosen) == len(best)


def test_ties_go_to_the_lower_entry():
    scores = torch.tensor([[0.0, 1.0, -0.0, 0.0, 1.0, 0.0], [-1.0, -1.0, -2.0, -1.0, -1.0, 5.0]])

    ids = select_topk(scores, torch.tensor([6, 5]), 3)

    assert sorted(ids[0].tolist()) == [0, 1, 4]
    assert sorted(ids[1].tolist()) == [0, 1, 3]


def test_many_ties_select_a_prefix():
    ids = select_topk(torch.zeros(2, 5000), torch.tensor([5000, 17]), 100)

    assert sorted(ids[0].tolist()) == list(range(100))
    assert sorted(w for w in ids[1].tolist() if w >= 0) == list(range(17))


def test_nan_and_large_scores_beyond_the_visible_ones_are_ignored():
    scores = torch.tensor([[1.0, 2.0, float("nan"), float("inf"), 3.0]])

    assert select_topk(scores, torch.tensor([2]), 4)[0].tolist() == [0, 1, -1, -1]


def test_tiling_over_queries_changes_nothing(monkeypatch):
    q, keys, weights = _inputs(10, 50, 2)
    num_visible = torch.arange(41, 51)
    whole = index_topk(q, keys, weights, num_visible, 8)

    monkeypatch.setattr(op, "_WORKSPACE_VALUES", 16 * 50 * 3)

    assert torch.equal(index_topk(q, keys, weights, num_visible, 8), whole)
    assert torch.equal(whole, whole.sort().values)


def test_weights_of_another_shape_are_refused():
    q, keys, weights = _inputs(3, 7, 3)
    with pytest.raises(ValueError, match="do not fit"):
        index_topk(q, keys, weights[:2], torch.tensor([7, 7, 7]), 4)
