"""Sampling ops against plain formulas in fp64: truncation, bias, bans, masks, penalties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_kernels.sampling.op import add_bias, apply_bitmask, apply_penalties, ban_tokens, sample
from dsv4_kernels.sampling.truncate import truncate

VOCAB = 37
MASS_SLACK = 1e-6  # fp32 logits and their log-sum carry about 1e-7 of relative error into a mass

rows_of_logits = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(lambda row: [x / 8 for x in row])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def cut(row, *, top_k=0, top_p=1.0, min_p=0.0, head_size=64) -> list[int]:
    """Token ids that stay."""
    limits = {"top_k": ints(top_k), "top_p": torch.tensor([top_p]), "min_p": torch.tensor([min_p])}
    kept = truncate(torch.tensor([row]), **limits, head_sizes=(head_size,))
    return torch.isfinite(kept)[0].nonzero().flatten().tolist()


def expected_cut(row, top_k, top_p, min_p) -> list[int]:
    """top_k, then the nucleus of what it leaves, then min_p; in Python floats, one token after the other."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    left = order[:top_k] if top_k else order
    total = math.fsum(math.exp(row[i]) for i in left)
    kept, mass = [], 0.0
    for i in left:
        if kept and top_p < 1 and mass >= top_p:
            break
        kept.append(i)
        mass += math.exp(row[i]) / total
    return sorted(i for i in kept if math.exp(row[i] - row[order[0]]) >= min_p)


@settings(max_examples=150, deadline=None)
@given(
    row=rows_of_logits,
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.integers(1, 64).map(lambda x: x / 64),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]),
    head_size=st.integers(1, VOCAB),
)
def test_truncation_is_top_k_then_top_p_then_min_p(row, top_k, top_p, min_p, head_size):
    kept = cut(row, top_k=top_k, top_p=top_p, min_p=min_p, head_size=head_size)

    low = expected_cut(row, top_k, top_p - MASS_SLACK, min_p * (1 + 1e-6))
    high = expected_cut(row, top_k, top_p + MASS_SLACK if top_p < 1 else 1, min_p * (1 - 1e-6))
    assert set(low) <= set(kept) <= set(high)


def test_top_p_keeps_the_shortest_run_that_reaches_the_mass():
    row = torch.tensor([0.1, 0.5, 0.3, 0.1]).log().tolist()

    assert cut(row, top_p=0.4) == [1]
    assert cut(row, top_p=0.6) == [1, 2]
    assert cut(row, top_p=0.85) == [0, 1, 2]  # equal masses: the lower id is kept
    assert cut(row, top_p=1e-9) == [1]


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id():
    assert cut([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [1, 2]
    assert cut([0.0] * 6, top_k=4) == [0, 1, 2, 3]
    assert cut([1.0, 2.0], top_k=5) == [0, 1]


def test_min_p_is_a_share_of_the_most_probable_token():
    row = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().tolist()

    assert cut(row, min_p=0.45) == [0, 1]
    assert cut(row, min_p=1.0) == [0]


def test_a_row_is_cut_the_same_in_any_batch_and_with_any_head():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)) * 3
    limits = {
        "top_k": ints(0, 3, 0, 200, 0, 7),
        "top_p": torch.tensor([1.0, 1.0, 0.8, 0.95, 1.0, 0.5]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02, 0.3]),
    }

    together = truncate(logits, **limits)

    assert torch.equal(together[0], logits[0])
    for i in range(6):
        alone = truncate(logits[i : i + 1], **{name: limit[i : i + 1] for name, limit in limits.items()})
        assert torch.equal(alone[0], together[i])
        assert torch.equal(truncate(logits, **limits, head_sizes=(8, 20))[i], together[i])


def test_a_row_without_limits_is_returned_as_it_is():
    logits = torch.randn(2, 20)

    assert truncate(logits, top_k=ints(0, 20), top_p=torch.ones(2), min_p=torch.zeros(2)) is logits


@settings(max_examples=60, deadline=None)
@given(row=rows_of_logits, seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**20), top_k=st.integers(1, VOCAB))
def test_a_sampled_token_is_one_that_was_left(row, seed, position, top_k):
    token_id = sample(
        torch.tensor([row]),
        torch.tensor([1.5]),
        torch.tensor([0.9]),
        ints(seed),
        ints(position),
        top_k=ints(top_k),
        min_p=torch.tensor([0.05]),
    ).item()

    scaled = [x / 1.5 for x in row]
    assert token_id in expected_cut(scaled, top_k, 0.9 + MASS_SLACK, 0.05 * (1 - 1e-6))


def test_a_temperature_next_to_zero_is_greedy_and_finite():
    logits = torch.tensor([[1000.0, 1001.0, -1000.0, 1000.5]]).repeat(3, 1)

    tokens = sample(logits, torch.tensor([1e-45, 1e-40, 1e-30]), torch.ones(3), ints(1, 2, 3), ints(1, 2, 3))

    assert tokens.tolist() == [1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    row=rows_of_logits,
    counts=st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, 9)),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.1, 3),
)
def test_penalties_follow_the_formula_and_leave_other_tokens_alone(row, counts, presence, frequency, repetition):
    logits = torch.tensor([[0.0] * VOCAB, row])
    size = len(counts)

    apply_penalties(
        logits,
        ints(*[1] * size),
        ints(*counts),
        torch.tensor(list(counts.values()), dtype=torch.float32),
        torch.tensor([[presence, frequency, repetition]] * size, dtype=torch.float32).reshape(size, 3),
    )

    expected = list(row)
    for token_id, count in counts.items():
        x = row[token_id]
        x = x / repetition if x > 0 else x * repetition
        expected[token_id] = x - frequency * count - presence * (count > 0)
    assert not logits[0].any()
    assert torch.allclose(logits[1].double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-6)


def test_bias_is_added_to_its_tokens_only():
    logits = torch.zeros(2, 5)

    add_bias(logits, ints(0, 1, 1), ints(4, 0, 4), torch.tensor([1.5, -100.0, 2.0]))

    assert logits.tolist() == [[0, 0, 0, 0, 1.5], [-100, 0, 0, 0, 2]]


@settings(max_examples=60, deadline=None)
@given(allowed=st.sets(st.integers(0, 99), min_size=1), num_words=st.integers(1, 5))
def test_a_bitmask_leaves_the_tokens_of_its_bits(allowed, num_words):
    words = [0] * num_words
    for token_id in allowed:
        if token_id < 32 * num_words:
            words[token_id // 32] |= 1 << (token_id % 32)
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    logits = torch.ones(2, 100)

    apply_bitmask(logits, ints(1), torch.tensor([signed], dtype=torch.int32))

    assert torch.isfinite(logits[0]).all()
    assert set(torch.isfinite(logits[1]).nonzero().flatten().tolist()) == {t for t in allowed if t < 32 * num_words}


@pytest.mark.parametrize(("mask", "left"), [(0b0010, [1]), (0b0110, [2])])
def test_a_ban_yields_only_where_a_mask_allows_nothing_else(mask, left):
    logits = torch.zeros(2, 4)
    apply_bitmask(logits, ints(0), torch.tensor([[mask]], dtype=torch.int32))

    ban_tokens(logits, ints(0, 1), ints(1, 1), masked_rows=ints(0))

    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == left
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [0, 2, 3]
