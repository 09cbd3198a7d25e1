"""Attention over shared latents: both forms against a per-row formula, over the corner grid."""

import pytest
import torch

from dsv4_kernels.attention import masked_attention, op, paged_attention
from dsv4_kernels.kv.rows import RowFormat, round_rows
from dsv4_kernels.testing import max_error, nan_pool, scattered_slots

DIM, HEADS, SCALE = 24, 3, 24**-0.5
PLAIN = RowFormat("plain", DIM)


def _formula(q, kv, sink):
    """One query in fp64. q: [H, dim]; kv: [n, dim]; sink: [H] or None."""
    logits = q.double() @ kv.double().T * SCALE  # [H, n]
    columns = logits if sink is None else torch.cat((logits, sink.double()[:, None]), 1)
    if columns.shape[1] == 0:
        return torch.zeros_like(q)
    return (columns.softmax(1)[:, : kv.shape[0]] @ kv.double()).float()


def _case(num_tokens, counts, *, fmt=PLAIN, rows_per_page=5, seed=0):
    """A pool that is NaN except for the slots in use, and per query `counts[t]` of them, padded with -1."""
    generator = torch.Generator().manual_seed(seed)
    width, num_rows = max([0, *counts]), 40
    rows = torch.randn(num_rows, fmt.dim, generator=generator)
    pool = nan_pool(fmt, 12, rows_per_page)
    place = scattered_slots(num_rows, 12 * rows_per_page, generator)
    pool.write(place, rows)
    picks = [torch.randperm(num_rows, generator=generator)[:n] for n in counts]
    slots = torch.full((num_tokens, width), -1)
    for t, pick in enumerate(picks):
        columns = torch.randperm(width, generator=generator)[: len(pick)]
        slots[t, columns] = place[pick]
    q = torch.randn(num_tokens, HEADS, fmt.dim, generator=generator)
    return q, pool, slots, [round_rows(fmt, rows)[pick] for pick in picks]


@pytest.fixture(params=["sink", "no_sink"])
def sink(request):
    return torch.tensor([0.3, -2.0, 5.0]) if request.param == "sink" else None


COUNTS = {
    "zero_tokens": [],
    "one_token": [7],
    "no_history": [1],
    "one_query_without_keys": [3, 0, 5],
    "all_without_keys": [0, 0],
    "page_minus_one": [4],
    "page": [5],
    "page_plus_one": [6],
    "ragged": [1, 40, 13, 2],
}


@pytest.mark.parametrize("name", COUNTS)
def test_paged_attention_follows_the_formula_and_reads_only_named_slots(name, sink):
    counts = COUNTS[name]
    q, pool, slots, keys = _case(len(counts), counts, seed=len(name))

    out = paged_attention(q, [pool], [slots], sink=sink, scale=SCALE)

    expected = torch.stack([_formula(row, kv, sink) for row, kv in zip(q, keys, strict=True)]) if counts else q
    assert out.shape == q.shape
    assert max_error(out, expected) < 1e-5


@pytest.mark.parametrize("rows_per_page", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
def test_page_size_and_row_format_do_not_matter(rows_per_page, kind, sink):
    fmt = RowFormat(kind, 128, 64) if kind == "kv_fp8" else RowFormat(kind, 128)
    counts = [9, 3]
    generator = torch.Generator().manual_seed(rows_per_page)
    rows = torch.randn(12, 128, generator=generator)
    pool = nan_pool(fmt, 64, rows_per_page)
    place = scattered_slots(12, 64 * rows_per_page, generator)
    pool.write(place, rows)
    slots = torch.full((2, 9), -1)
    slots[0], slots[1, 4:7] = place[:9], place[9:]
    q = torch.randn(2, HEADS, 128, generator=generator)

    out = paged_attention(q, [pool], [slots], sink=sink, scale=SCALE)

    stored = round_rows(fmt, rows)
    assert counts == [9, 3]
    assert max_error(out[0], _formula(q[0], stored[:9], sink)) < 1e-5
    assert max_error(out[1], _formula(q[1], stored[9:], sink)) < 1e-5


def test_two_pools_share_one_softmax(sink):
    q, window, window_slots, window_keys = _case(3, [4, 1, 6], seed=1)
    _, entries, entry_slots, entry_keys = _case(3, [0, 8, 2], seed=2, rows_per_page=2 * 2)

    out = paged_attention(q, [window, entries], [window_slots, entry_slots], sink=sink, scale=SCALE)

    for t in range(3):
        assert max_error(out[t], _formula(q[t], torch.cat((window_keys[t], entry_keys[t])), sink)) < 1e-5


def test_masked_attention_equals_paged_attention(sink):
    q, pool, slots, _ = _case(4, [1, 40, 13, 0], seed=3)
    used = slots[slots >= 0].unique()
    kv = pool.gather(used)
    mask = (slots.unsqueeze(-1) == used).any(1)

    out = masked_attention(q, [kv[:7], kv[7:]], [mask[:, :7], mask[:, 7:]], sink=sink, scale=SCALE)
    own = kv[7:].expand(4, -1, -1).flip(1)  # rows of each query's own, in another order
    mixed = masked_attention(q, [kv[:7], own], [mask[:, :7], mask[:, 7:].flip(1)], sink=sink, scale=SCALE)

    expected = paged_attention(q, [pool], [slots], sink=sink, scale=SCALE)
    assert max_error(out, expected) < 1e-5 and max_error(mixed, expected) < 1e-5


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_masked_attention_accepts_no_rows_at_all(num_tokens, sink):
    q = torch.randn(num_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(4))

    out = masked_attention(q, [q.new_zeros(0, DIM)], [torch.zeros(num_tokens, 0, dtype=torch.bool)],
                           sink=sink, scale=SCALE)  # fmt: skip

    assert torch.equal(out, torch.zeros_like(q))


def test_large_logits_do_not_overflow():
    q, pool, slots, keys = _case(2, [5, 9], seed=5)
    q = q * 1e3
    sink = torch.full((HEADS,), -1e3)

    out = paged_attention(q, [pool], [slots], sink=sink, scale=SCALE)

    assert out.isfinite().all()
    for t in range(2):
        assert max_error(out[t], _formula(q[t], keys[t], sink)) < 1e-3


def test_a_dominant_sink_takes_all_the_weight():
    q, pool, slots, _ = _case(2, [5, 9], seed=6)

    out = paged_attention(q, [pool], [slots], sink=torch.full((HEADS,), 1e4), scale=SCALE)

    assert torch.equal(out, torch.zeros_like(out))


def test_a_non_contiguous_query_gives_the_same_values(sink):
    q, pool, slots, _ = _case(3, [4, 1, 6], seed=7)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)

    assert not strided.is_contiguous()
    out = paged_attention(strided, [pool], [slots], sink=sink, scale=SCALE)
    torch.testing.assert_close(out, paged_attention(q, [pool], [slots], sink=sink, scale=SCALE))


def test_tiling_over_queries_changes_nothing(monkeypatch, sink):
    q, pool, slots, _ = _case(5, [4, 1, 6, 0, 3], seed=8)
    whole = paged_attention(q, [pool], [slots], sink=sink, scale=SCALE)

    monkeypatch.setattr(op, "_WORKSPACE_VALUES", 2 * 6 * DIM)

    torch.testing.assert_close(paged_attention(q, [pool], [slots], sink=sink, scale=SCALE), whole)


def test_bf16_probabilities_are_rounded_before_the_value_product():
    q, pool, slots, keys = _case(1, [7], seed=9)
    low = q.bfloat16()

    out = paged_attention(low, [pool], [slots], sink=None, scale=SCALE)

    assert out.dtype == torch.bfloat16
    # bf16 weights: relative 2^-9 each, on rows of size up to 3; the output itself is rounded once more
    assert max_error(out[0].float(), _formula(low[0].float(), keys[0], None)) < 3 * 2**-8


def test_shapes_that_disagree_are_refused():
    q, pool, slots, _ = _case(2, [5, 9], seed=10)
    with pytest.raises(ValueError, match="q has 2"):
        paged_attention(q, [pool], [slots[:1]], sink=None, scale=SCALE)
    with pytest.raises(ValueError, match=r"expected \(3,\)"):
        paged_attention(q, [pool], [slots], sink=torch.zeros(4), scale=SCALE)
