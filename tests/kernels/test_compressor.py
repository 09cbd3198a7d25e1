"""Compressor pooling: the formula, the overlap of CSA blocks, absent tokens, and the streaming identity."""

import pytest
import torch

from dsv4_kernels.compressor import op, pool_entries


def _tokens(num_tokens, channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, channels, generator=generator), 3 * torch.randn(
        num_tokens, channels, generator=generator
    )


def _blocks(num_blocks, ratio, overlap):
    """Rows of consecutive blocks of one sequence; the block before the first is absent."""
    first = torch.arange(num_blocks).unsqueeze(1) * ratio
    span = torch.arange(-ratio if overlap else 0, ratio)
    return (first + span).clamp(min=-1)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_a_block_is_pooled_per_channel_with_softmax_gates(ratio, num_blocks):
    kv, gate = _tokens(ratio * 2, 24)

    entries = pool_entries(kv, gate, _blocks(num_blocks, ratio, False), overlap=False)

    assert entries.shape == (num_blocks, 24)
    for w in range(num_blocks):
        rows = slice(w * ratio, (w + 1) * ratio)
        expected = (gate[rows].double().softmax(0) * kv[rows].double()).sum(0)
        torch.testing.assert_close(entries[w], expected.float(), atol=1e-5, rtol=1e-5)


def test_a_token_gives_its_first_half_to_the_next_block_and_its_second_to_its_own():
    kv, gate = _tokens(12, 2 * 10)

    entries = pool_entries(kv, gate, _blocks(3, 4, True), overlap=True)

    for w in (1, 2):
        previous, own = slice(4 * w - 4, 4 * w), slice(4 * w, 4 * w + 4)
        gates = torch.cat((gate[previous, :10], gate[own, 10:])).double().softmax(0)
        values = torch.cat((kv[previous, :10], kv[own, 10:])).double()
        torch.testing.assert_close(entries[w], (gates * values).sum(0).float(), atol=1e-5, rtol=1e-5)


def test_the_first_block_pools_its_own_tokens_only():
    kv, gate = _tokens(4, 2 * 10)

    entry = pool_entries(kv, gate, _blocks(1, 4, True), overlap=True)[0]

    torch.testing.assert_close(entry, (gate[:, 10:].softmax(0) * kv[:, 10:]).sum(0))


def test_entries_do_not_depend_on_where_their_rows_lie():
    kv, gate = _tokens(12, 20)
    rows = _blocks(3, 4, True)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    place = torch.empty(12, dtype=torch.int64).index_copy_(0, order, torch.arange(12))

    moved = pool_entries(kv[order], gate[order], torch.where(rows >= 0, place[rows], -1), overlap=True)

    assert torch.equal(moved, pool_entries(kv, gate, rows, overlap=True))


def test_nan_in_rows_that_no_block_names_is_not_read():
    kv, gate = _tokens(12, 20)
    expected = pool_entries(kv, gate, _blocks(3, 4, True)[2:], overlap=True)

    kv[:4], gate[:4] = float("nan"), float("nan")

    assert torch.equal(pool_entries(kv, gate, _blocks(3, 4, True)[2:], overlap=True), expected)


def test_large_gates_do_not_overflow():
    kv, gate = _tokens(128, 6)

    entry = pool_entries(kv, gate + 1e4, _blocks(1, 128, False), overlap=False)

    assert entry.isfinite().all()


def test_a_non_contiguous_input_gives_the_same_values():
    kv, gate = _tokens(8, 40)

    strided = pool_entries(kv[:, ::2], gate[:, ::2], _blocks(2, 4, True), overlap=True)

    dense = pool_entries(kv[:, ::2].contiguous(), gate[:, ::2].contiguous(), _blocks(2, 4, True), overlap=True)
    assert torch.equal(strided, dense)


def test_tiling_over_entries_changes_nothing(monkeypatch):
    kv, gate = _tokens(40, 20)
    whole = pool_entries(kv, gate, _blocks(10, 4, True), overlap=True)

    monkeypatch.setattr(op, "_WORKSPACE_VALUES", 3 * 2 * 8 * 10)

    assert torch.equal(pool_entries(kv, gate, _blocks(10, 4, True), overlap=True), whole)


def test_gates_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="differ"):
        pool_entries(torch.zeros(4, 8), torch.zeros(4, 9), _blocks(1, 4, False), overlap=False)
