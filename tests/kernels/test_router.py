"""Router: experts, weights, padding and tables; the reference, Triton interpreted, compiled for sm_90a, on the GPU."""

import pytest
import torch

from dsv4_kernels.moe import build_work_list, route_by_hash, route_by_score, sqrt_softplus
from dsv4_kernels.router import route, triton_impl
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
)
from tests.kit.sm90a import recorded_launches

BF16 = torch.bfloat16
VOCAB = 1000
OPTIONS = {"vocab_size": VOCAB, "topk": 6, "renormalise": True, "scaling": 1.5}


def _inputs(num_tokens, dim, num_experts, generator, device):
    x = torch.randn(num_tokens, dim, generator=generator).to(BF16)
    weight = (4 * torch.randn(num_experts, dim, generator=generator) * dim**-0.5).to(BF16)
    ids = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    bias = 0.1 * torch.randn(num_experts, generator=generator)
    table = torch.rand(VOCAB, num_experts, generator=generator).topk(6).indices
    return tuple(value.to(device) for value in (x, weight, ids, bias, table))


def _scores(x, weight):
    return sqrt_softplus(x.double() @ weight.double().T)


def _score_bound(x, weight):
    """Largest error of a score: fp32 sums of D products, then sqrt(softplus), whose slope is below 1."""
    magnitude = float((x.float().abs() @ weight.float().abs().T).max()) if len(x) else 0.0
    return (magnitude * 8 + 16) * unit_roundoff(torch.float32)


def _weights(scores, ids):
    chosen = scores.gather(1, ids.long())
    return 1.5 * chosen / chosen.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("num_tokens", "dim", "num_experts"), [(0, 64, 32), (1, 4096, 256), (3, 300, 24), (70, 512, 96)]
)
def test_the_best_experts_by_score_and_bias_are_chosen(triton_device, generator, num_tokens, dim, num_experts):
    x, weight, ids, bias, _ = _inputs(num_tokens, dim, num_experts, generator, triton_device)

    with guarded_allocations():
        chosen, weights = route(x, weight, ids, bias=bias, **OPTIONS, impl="triton")

    assert_fully_written(chosen, weights)
    assert chosen.dtype == torch.int32
    scores, bound = _scores(x, weight), _score_bound(x, weight)
    biased = scores + bias.double()
    worst = biased.gather(1, chosen.long()).amin(1, keepdim=True) if num_tokens else biased[:, :1]
    others = biased.scatter(1, chosen.long(), float("-inf"))
    assert (others <= worst + 2 * bound).all()  # nothing better was left out
    assert all(len(set(row)) == 6 for row in chosen.tolist())
    assert_within(weights, _weights(scores, chosen), 1.5 * 8 * bound)


def test_wide_tiles_of_a_long_prompt_give_the_same_weights(triton_device, generator, monkeypatch):
    x, weight, ids, bias, _ = _inputs(130, 512, 136, generator, triton_device)
    expected = route(x, weight, ids, bias=bias, **OPTIONS, impl="triton")
    monkeypatch.setattr(triton_impl, "_SPREAD_TOKENS", 100)
    monkeypatch.setattr(triton_impl, "_WIDE_TOKENS", 100)

    with guarded_allocations():
        chosen, weights = route(x, weight, ids, bias=bias, **OPTIONS, impl="triton")

    assert_fully_written(chosen, weights)
    assert torch.equal(chosen, expected[0])
    assert_within(weights, expected[1].double(), 1.5 * 16 * _score_bound(x, weight))


def test_equal_scores_go_to_the_lower_expert(triton_device):
    x = torch.ones(2, 64, dtype=BF16, device=triton_device)
    weight = torch.zeros(40, 64, dtype=BF16, device=triton_device)
    bias = torch.zeros(40, device=triton_device)
    bias[[7, 30]] = 1.0
    ids = torch.zeros(2, dtype=torch.int64, device=triton_device)

    chosen, weights = route(x, weight, ids, bias=bias, **OPTIONS, impl="triton")

    assert chosen.tolist() == [[7, 30, 0, 1, 2, 3]] * 2
    assert_within(weights, torch.full_like(weights, 0.25, dtype=torch.float64), 8 * unit_roundoff(torch.float32))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_table_fixes_the_experts_and_names_outside_the_range_route_nowhere(triton_device, generator, impl):
    x, weight, ids, _, table = _inputs(7, 320, 64, generator, triton_device)
    table[ids[2], 1], table[ids[2], 4], table[ids[3]] = 64, -5, -1

    chosen, weights = route(x, weight, ids, table=table.int(), **OPTIONS, impl=impl)

    expected = table[ids]
    is_expert = (expected >= 0) & (expected < 64)
    assert torch.equal(chosen.long(), torch.where(is_expert, expected, -1))
    assert (weights[~is_expert] == 0).all()
    scores = _scores(x, weight).gather(1, expected.clamp(0, 63)).masked_fill(~is_expert, 0)
    exact = 1.5 * scores / (scores.sum(1, keepdim=True) + 1e-20)
    assert_within(weights, exact, 1.5 * 8 * _score_bound(x, weight))


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("way", ["score", "hash"])
def test_padded_rows_route_nowhere(triton_device, generator, impl, way):
    x, weight, ids, bias, table = _inputs(5, 128, 32, generator, triton_device)
    x[1], ids[1], ids[4] = float("nan"), -1, VOCAB
    how = {"bias": bias} if way == "score" else {"table": table}

    chosen, weights = route(x, weight, ids, **how, **OPTIONS, impl=impl)

    assert (chosen[[1, 4]] == -1).all() and (weights[[1, 4]] == 0).all()
    assert (chosen[[0, 2, 3]] >= 0).all() and (weights[[0, 2, 3]] > 0).all()


def test_padded_rows_are_in_no_tile_of_the_work_list(triton_device, generator):
    x, weight, ids, bias, _ = _inputs(5, 128, 32, generator, triton_device)
    ids[1], ids[4] = -1, VOCAB

    chosen, _ = route(x, weight, ids, bias=bias, **OPTIONS, impl="triton")
    work = build_work_list(chosen, num_experts=32, rows_per_tile=16, impl="triton")

    pairs = work.pairs[work.pairs >= 0]
    assert sorted((pairs // 6).tolist()) == [0] * 6 + [2] * 6 + [3] * 6
    assert int(work.tile_rows.sum()) == 18


def test_a_row_of_nan_still_names_experts_that_exist(triton_device, generator):
    x, weight, ids, bias, _ = _inputs(2, 128, 24, generator, triton_device)
    x[0] = float("nan")

    chosen, _ = route(x, weight, ids, bias=bias, **OPTIONS, impl="triton")

    assert ((chosen >= 0) & (chosen < 24)).all()


def test_the_reference_is_the_two_routings(generator):
    x, weight, ids, bias, table = _inputs(9, 64, 32, generator, "cpu")
    logits = x.float() @ weight.float().T

    by_score = route(x, weight, ids, bias=bias, **OPTIONS, impl="reference")
    by_hash = route(x, weight, ids, table=table, **OPTIONS, impl="reference")

    for (chosen, weights), expected in (
        (by_score, route_by_score(logits, bias, 6, renormalise=True, scaling=1.5)),
        (by_hash, route_by_hash(logits, table[ids], renormalise=True, scaling=1.5)),
    ):
        assert torch.equal(chosen.long(), expected[0])
        torch.testing.assert_close(weights, expected[1])  # a width of 33 instead of 32 is vectorised otherwise


def test_large_negative_logits_keep_their_scores(triton_device):
    x = torch.full((1, 64), -1.0, dtype=BF16, device=triton_device)
    weight = (
        (torch.arange(32, device=triton_device)[:, None] / 64).expand(32, 64).to(BF16).contiguous()
    )  # logits 0 .. -31
    ids = torch.zeros(1, dtype=torch.int64, device=triton_device)

    chosen, weights = route(x, weight, ids, bias=torch.arange(32.0, device=triton_device), vocab_size=VOCAB, topk=4,
                            renormalise=False, scaling=1.0, impl="triton")  # fmt: skip

    assert chosen.tolist() == [[31, 30, 29, 28]]
    exact = _scores(x, weight)[:, [31, 30, 29, 28]]  # about 4e-7; the naive form gives 0
    assert_within(weights, exact, exact * 2.0**-18)  # exp of -31 to about 2^-20


def test_either_a_bias_or_a_table_is_needed(generator):
    x, weight, ids, bias, table = _inputs(1, 64, 32, generator, "cpu")

    with pytest.raises(ValueError, match="either a bias"):
        route(x, weight, ids, **OPTIONS)
    with pytest.raises(ValueError, match="either a bias"):
        route(x, weight, ids, bias=bias, table=table, **OPTIONS)


@pytest.mark.parametrize("num_tokens", [128, 8192])
@pytest.mark.parametrize(("num_experts", "dim", "way"), [(256, 4096, "score"), (384, 7168, "hash")])
def test_compiles_for_hopper_without_spills(num_tokens, num_experts, dim, way):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    how = {"bias": meta(num_experts)} if way == "score" else {"table": meta(VOCAB, 6, dtype=torch.int32)}
    with recorded_launches() as launches:
        route(meta(num_tokens, dim, dtype=BF16), meta(num_experts, dim, dtype=BF16),
              meta(num_tokens, dtype=torch.int64), **how, **OPTIONS, impl="triton")  # fmt: skip

    product, select = (launch.compile() for launch in launches)
    product.assert_no_spills()
    product.assert_tensor_core("HGMMA")
    product.assert_128bit_loads()
    select.assert_no_spills()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["score", "hash"])
def test_tokens_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator, way):
    x, weight, ids, bias, table = _inputs(700, 4096, 256, generator, cuda)
    other = _inputs(700, 4096, 256, generator, cuda)

    def op(x, weight, ids, bias, table):
        how = {"bias": bias} if way == "score" else {"table": table}
        return route(x, weight, ids, **how, **OPTIONS, impl="triton")

    # up to 512 tokens chunks are spread over programs, and above 4,096 tiles are wider
    rows = [[0], [699], range(7), range(128), range(513), [5, 5, 31], [row % 700 for row in range(4200)]]
    assert_batch_invariant(op, (x, weight, ids, bias, table), batched=[0, 2], rows=rows)
    assert_graph_replays(op, (x, weight, ids, bias, table), (other[0], weight, other[2], bias, table))
