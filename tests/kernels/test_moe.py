"""Routing and experts: golden values of spec 4.7 and the sum over experts written out."""

import pytest
import torch

from dsv4_kernels.moe import grouped_experts, route_by_hash, route_by_score, sqrt_softplus, swiglu


@pytest.mark.parametrize(
    ("z", "value"), [(0.0, 0.83255), (5.0, 2.23757), (30.0, 5.47723), (-20.0, 4.54e-5), (100.0, 10.0)]
)
def test_sqrt_softplus_matches_the_golden_values(z, value):
    assert sqrt_softplus(torch.tensor([z])).item() == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(("gate", "up", "value"), [(12.0, -15.0, -99.99546), (2.0, 4.0, 7.04638)])
def test_swiglu_matches_the_golden_values(gate, up, value):
    assert swiglu(torch.tensor([gate]), torch.tensor([up]), 10.0).item() == pytest.approx(value, rel=1e-6)


def test_the_gate_is_clamped_from_above_only():
    gate = torch.tensor([-30.0, -3.0])

    assert torch.equal(swiglu(gate, torch.ones(2), 1.0), torch.nn.functional.silu(gate))


def test_score_routing_selects_with_the_bias_and_weighs_without_it():
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(9, 16, generator=generator), 2 * torch.randn(16, generator=generator)

    ids, weights = route_by_score(logits, bias, 6, renormalise=True, scaling=1.5)

    scores = torch.nn.functional.softplus(logits.double()).sqrt().float()
    for t in range(9):
        best = sorted(range(16), key=lambda e, t=t: -float(scores[t, e] + bias[e]))[:6]
        assert sorted(ids[t].tolist()) == sorted(best)
        torch.testing.assert_close(weights[t], 1.5 * scores[t, ids[t]] / scores[t, ids[t]].sum())


def test_equal_scores_go_to_the_lower_expert():
    ids, _ = route_by_score(torch.zeros(1, 12), torch.zeros(12), 5, renormalise=True, scaling=1.0)

    assert ids.tolist() == [[0, 1, 2, 3, 4]]


def test_hash_routing_keeps_the_table_and_uses_the_learned_scores():
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[7, 0], [1, 2], [3, 3], [5, 4]])

    ids, weights = route_by_hash(logits, table, renormalise=True, scaling=2.0)

    assert torch.equal(ids, table)
    chosen = sqrt_softplus(logits).gather(1, table)
    torch.testing.assert_close(weights, 2.0 * chosen / chosen.sum(1, keepdim=True))


def test_a_token_that_scores_zero_on_all_its_experts_gets_zero_weights():
    _, weights = route_by_hash(torch.full((1, 4), -1e4), torch.tensor([[0, 1]]), renormalise=True, scaling=1.0)

    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [1, 0, 0, 0], [0, 3, 0, 2], [2, 2, 2, 2]])
def test_grouped_experts_equal_each_row_through_its_own_expert(counts):
    generator = torch.Generator().manual_seed(sum(counts))
    num_rows = sum(counts)
    x, weights = torch.randn(num_rows, 12, generator=generator), torch.rand(num_rows, generator=generator)
    w1, w3 = torch.randn(4, 10, 12, generator=generator), torch.randn(4, 10, 12, generator=generator)
    w2 = torch.randn(4, 12, 10, generator=generator)

    y = grouped_experts(x, weights, counts, w1=w1, w2=w2, w3=w3, limit=2.0)

    owner = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert y.shape == (num_rows, 12) and y.dtype == torch.float32
    for i, e in enumerate(owner):
        expected = w2[e] @ (swiglu(w1[e] @ x[i], w3[e] @ x[i], 2.0) * weights[i])
        torch.testing.assert_close(y[i], expected, atol=1e-4, rtol=1e-4)


def test_a_non_contiguous_input_gives_the_same_values():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 5, generator=generator).T
    stacks = {
        name: torch.randn(2, *shape, generator=generator)
        for name, shape in (("w1", (10, 12)), ("w2", (12, 10)), ("w3", (10, 12)))
    }

    strided = grouped_experts(x, torch.ones(5), [2, 3], limit=2.0, **stacks)

    torch.testing.assert_close(strided, grouped_experts(x.contiguous(), torch.ones(5), [2, 3], limit=2.0, **stacks))


def test_counts_that_do_not_cover_the_rows_are_refused():
    with pytest.raises(ValueError, match="sum 3 for 4 rows"):
        grouped_experts(torch.zeros(4, 2), torch.zeros(4), [1, 2], w1=torch.zeros(2, 3, 2), w2=torch.zeros(2, 2, 3),
                        w3=torch.zeros(2, 3, 2), limit=1.0)  # fmt: skip
