"""Drafts follow acceptance, cost and load."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_cluster.speculation.budget import (
    FIRST_RATES,
    Acceptance,
    LineFit,
    StepCost,
    choose_num_drafts,
    share_drafts,
)

IDLE = StepCost(fixed=1.0, per_row=0.01, pass_fixed=0.05, pass_per_row=0.001)  # weights dominate: rows are almost free
FULL = StepCost(fixed=0.0, per_row=1.0, pass_fixed=0.0, pass_per_row=0.1)  # every row costs as much as the first


def expected(rates, num_drafts, cost: StepCost) -> float:
    """Tokens per cost of a whole batch, from the definition."""
    num_rows = sum(1 + count for count in num_drafts)
    total = cost.fixed + num_rows * cost.per_row
    total += max(num_drafts) * cost.pass_fixed + sum(num_drafts) * cost.pass_per_row
    return tokens_of(rates, num_drafts) / total


def tokens_of(rates, num_drafts) -> float:
    """1 + a1 + a1 a2 + ... per row."""
    total = 0.0
    for row, count in zip(rates, num_drafts, strict=True):
        reach = 1.0
        total += reach
        for depth in range(count):
            reach *= row[depth]
            total += reach
    return total


def test_idle_devices_draft_deep_and_full_ones_not_at_all():
    good = (0.8, 0.7, 0.6, 0.6)

    assert choose_num_drafts([good], [4], IDLE) == [4]
    assert choose_num_drafts([good] * 64, [4] * 64, FULL) == [0] * 64


def test_in_a_batch_only_the_promising_sequences_draft():
    cost = StepCost(fixed=1.0, per_row=0.5, pass_fixed=0.02, pass_per_row=0.02)

    chosen = choose_num_drafts([(0.95,) * 4, (0.05,) * 4, (0.9,) * 4], [4, 4, 4], cost)

    assert chosen[0] >= chosen[2] > chosen[1] == 0


@given(
    st.lists(st.tuples(*[st.floats(0, 1)] * 4), min_size=1, max_size=3),
    st.tuples(*[st.floats(0.001, 2)] * 4).map(lambda values: StepCost(*values)),
)
def test_drafting_never_loses_against_plain_decoding_and_keeps_limits(rates, cost):
    limits = [2] * len(rates)

    chosen = choose_num_drafts(rates, limits, cost)

    assert all(0 <= count <= limit for count, limit in zip(chosen, limits, strict=True))
    assert expected(rates, chosen, cost) >= expected(rates, [0] * len(rates), cost) * (1 - 1e-9)


@pytest.mark.parametrize("a", [0.3, 0.6, 0.9])
def test_one_sequence_gets_the_best_number(a):
    cost = StepCost(fixed=1.0, per_row=0.1, pass_fixed=0.1, pass_per_row=0.0)
    rates = [(a,) * 4]

    (chosen,) = choose_num_drafts(rates, [4], cost)

    assert expected(rates, [chosen], cost) == max(expected(rates, [count], cost) for count in range(5))


def test_acceptance_counts_only_drafts_that_had_a_chance():
    acceptance = Acceptance().updated(4, 1)

    assert acceptance.checked == (1.0, 1.0, 0.0, 0.0)
    assert acceptance.accepted == (1.0, 0.0, 0.0, 0.0)


def test_acceptance_starts_at_the_prior_and_follows_what_is_seen():
    acceptance = Acceptance()
    assert acceptance.rates() == FIRST_RATES

    for _ in range(300):
        acceptance = acceptance.updated(1, 0)

    assert acceptance.rates()[0] < 0.06
    assert acceptance.rates()[1:] == FIRST_RATES[1:]


def test_the_cost_line_is_found_from_steps_of_several_sizes():
    fit = LineFit()
    for _, num_rows in product(range(5), (1, 2, 8)):
        fit = fit.updated(num_rows, 3.0 + 0.5 * num_rows)

    assert fit.line(0.1) == pytest.approx((3.0, 0.5))


def test_without_steps_of_several_sizes_the_default_share_splits_the_cost():
    fit = LineFit().updated(4, 1.4).updated(4, 1.4)

    assert fit.line(0.1) == pytest.approx((1.0, 0.1))


@given(st.lists(st.integers(0, 4), max_size=8), st.integers(0, 20))
def test_shared_drafts_stay_in_the_budget_and_are_level(wanted, budget):
    shared = share_drafts(wanted, budget)

    assert sum(shared) == min(budget, sum(wanted))
    assert all(0 <= count <= want for count, want in zip(shared, wanted, strict=True))
    cut = [count for count, want in zip(shared, wanted, strict=True) if count < want]
    assert all(count <= min(cut, default=4) + 1 for count in shared)
