"""Sampling in Triton: the reference's noise and tokens bit for bit, edits, log-probabilities, drafts."""

import pytest
import torch

from dsv4_kernels.sampling.op import (
    add_bias,
    apply_bitmask,
    apply_penalties,
    ban_tokens,
    gumbel_noise,
    sample,
    token_logprobs,
    verify_drafts,
)
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
)
from tests.kit.sm90a import recorded_launches

NEG_INF = float("-inf")
# (temperature, top_k, top_p, min_p)
ROWS = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.2),
    (1.0, 0, 1.0, 0.0),
    (1e-6, 0, 1.0, 0.0),
    (2.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.0, 4000, 1.0, 0.0),  # more than the head holds
    (1e30, 10000, 1.0, 0.0),  # more than there are
    (0.7, 0, 0.1, 0.0),
    (0.7, 0, 0.9, 0.0),
    (5.0, 0, 0.999, 0.0),  # a run longer than the head
    (1.0, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 1.0),
    (1.3, 50, 0.8, 0.01),
    (3.0, 3500, 0.99, 0.0),
]


def _limits(rows, device):
    heat, top_k, top_p, min_p = zip(*rows, strict=True)
    return {
        "temperature": torch.tensor(heat, device=device),
        "top_p": torch.tensor(top_p, device=device),
        "top_k": torch.tensor(top_k, device=device),
        "min_p": torch.tensor(min_p, device=device),
    }


def _seeds(num_rows, generator, device):
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator)
    positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    return {"seeds": seeds.to(device), "positions": positions.to(device)}


def test_noise_is_that_of_the_reference_bit_for_bit(triton_device, generator):
    where = _seeds(5, generator, triton_device)

    with guarded_allocations():
        noise = gumbel_noise(**where, vocab_size=3001, impl="triton")

    assert_fully_written(noise)
    assert torch.equal(noise, gumbel_noise(**where, vocab_size=3001, impl="reference"))


@pytest.mark.parametrize("kind", ["normal", "many rows", "peaked", "tied", "banned", "flat", "small vocabulary"])
def test_tokens_are_those_of_the_reference(triton_device, generator, kind):
    vocab_size = 37 if kind == "small vocabulary" else 5000
    rows = ROWS + ROWS[2:3] if kind in ("many rows", "flat") else ROWS  # above 16 a program takes several tiles
    logits = 3 * torch.randn(len(rows), vocab_size, generator=generator)
    if kind == "peaked":
        logits *= 20  # whole tiles that cannot win
    if kind == "tied":
        logits = (logits * 2).round() / 2
    if kind == "banned":
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = NEG_INF
    if kind == "flat":
        logits = torch.zeros_like(logits)
    inputs = {"logits": logits.to(triton_device), **_limits(rows, triton_device)}

    where = _seeds(len(rows), generator, triton_device)

    with guarded_allocations():
        token_ids = sample(**inputs, **where, impl="triton")

    assert_fully_written(token_ids)
    assert token_ids.tolist() == sample(**inputs, **where, impl="reference").tolist()


def test_without_limits_of_a_kind_its_tensor_may_be_missing(triton_device, generator):
    logits = torch.randn(4, 600, generator=generator).to(triton_device)
    where = _seeds(4, generator, triton_device)
    heat, ones = torch.tensor([1.0, 0.5, 0.0, 2.0], device=triton_device), torch.ones(4, device=triton_device)

    token_ids = sample(logits, heat, ones, **where, impl="triton")

    assert torch.equal(token_ids, sample(logits, heat, ones, **where, impl="reference"))
    empty = {name: value[:0] for name, value in where.items()}
    assert sample(logits[:0], heat[:0], ones[:0], **empty, impl="triton").shape == (0,)


def test_rows_of_nan_and_of_bans_only_give_a_token_that_exists(triton_device, generator):
    logits = torch.randn(4, 700, generator=generator)
    logits[0], logits[1], logits[2, 5] = float("nan"), NEG_INF, float("nan")
    where = _seeds(4, generator, triton_device)
    heat = torch.ones(4, device=triton_device)

    token_ids = sample(logits.to(triton_device), heat, 0.9 * heat, **where, impl="triton")

    assert ((token_ids >= 0) & (token_ids < 700)).all()


def test_edits_are_those_of_the_reference_and_padding_names_nothing(triton_device, generator):
    device = triton_device
    base = torch.randn(3, 400, generator=generator).to(device)
    rows = torch.tensor([0, 2, 2, 1, -1, 3], device=device)
    token_ids = torch.tensor([5, 399, 0, 7, 3, 3], device=device)
    values = torch.tensor([1.5, -2.0, 0.0, 3.0, 9.0, 9.0], device=device)
    penalties = torch.tensor([[0.5, 0.1, 1.2]], device=device).repeat(6, 1)
    words = torch.randint(-(2**31), 2**31, (2, 12), generator=generator).int().to(device)  # 384 of 400 tokens
    masked = torch.tensor([2, 0], device=device)

    edits = [
        lambda x, n, impl: add_bias(x, rows[:n], token_ids[:n], values[:n], impl=impl),
        lambda x, n, impl: apply_penalties(x, rows[:n], token_ids[:n], values[:n].abs(), penalties[:n], impl=impl),
        lambda x, n, impl: ban_tokens(x, rows[:n], token_ids[:n], impl=impl),
        lambda x, n, impl: apply_bitmask(x, masked, words, impl=impl),
    ]
    for edit in edits:
        actual, expected = base.clone(), base.clone()
        edit(actual, 6, "triton")
        edit(expected, 4, "reference")
        torch.testing.assert_close(actual, expected, rtol=2 * unit_roundoff(torch.float32), atol=1e-6)
        assert torch.equal(actual.isinf(), expected.isinf())


def test_bans_that_would_empty_a_masked_row_are_dropped(triton_device):
    logits = torch.full((3, 50), NEG_INF, device=triton_device)
    logits[:, 7], logits[0, 9] = 1.0, 2.0
    rows, token_ids = (torch.tensor(values, device=triton_device) for values in ([0, 1, 2, -1], [7, 7, 7, 7]))

    ban_tokens(logits, rows, token_ids, masked_rows=torch.tensor([0, 1], device=triton_device), impl="triton")

    assert logits[:, 7].tolist() == [NEG_INF, 1.0, NEG_INF]  # 0 has another token, 2 was not masked


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_of_the_chosen_and_of_the_most_probable(triton_device, generator, num_top):
    logits = (4 * torch.randn(3, 5000, generator=generator)).to(triton_device)
    logits[0, 100:200], logits[1, [3, 4, 4500]] = NEG_INF, 30.0
    token_ids = torch.tensor([0, 4500, 17], device=triton_device)

    with guarded_allocations():
        own, ids, values = token_logprobs(logits, token_ids, num_top, impl="triton")

    assert_fully_written(own, ids, values)
    expected = token_logprobs(logits, token_ids, num_top, impl="reference")
    assert torch.equal(ids, expected[1])
    # exp and sums of up to 5,000 terms in fp32, logarithm and differences in fp64, one rounding of about 30
    for actual, exact in ((own, expected[0]), (values, expected[2])):
        assert_within(actual, exact.double(), 64 * unit_roundoff(torch.float32))
    exact = torch.log_softmax(logits.double(), -1)
    assert_within(expected[0], exact.gather(1, token_ids[:, None])[:, 0], 32 * unit_roundoff(torch.float32))


def test_verified_tokens_end_at_the_first_disagreement_or_failure():
    drafts = torch.tensor([[1, 2], [1, 9], [9, 2], [1, -1], [1, 2], [1, 2], [1, 2]])
    sampled = torch.tensor([[1, 2, 3]]).repeat(7, 1)
    finite = torch.ones(7, 3, dtype=torch.bool)
    finite[4, 0], finite[5, 1], finite[6, 2] = False, False, False

    counts = verify_drafts(drafts, sampled, finite)

    assert counts.tolist() == [3, 2, 1, 2, 0, 1, 2] and counts.dtype == torch.int32
    with pytest.raises(ValueError, match="drafts"):
        verify_drafts(drafts, sampled[:, :2], finite[:, :2])


def test_compiles_for_hopper_with_wide_loads_and_without_spills():
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    num_rows, ints = 128, torch.int64
    logits, row = meta(num_rows, 129280), meta(num_rows)
    index = meta(num_rows, dtype=ints)
    with recorded_launches() as launches:
        sample(logits, row, row, index, index, top_k=index, min_p=row, impl="triton")
        token_logprobs(logits, index, 20, impl="triton")
        apply_bitmask(logits, index, meta(num_rows, 4040, dtype=torch.int32), impl="triton")
        ban_tokens(logits, index, index, masked_rows=index, impl="triton")
        apply_penalties(logits, index, index, row, meta(num_rows, 3), impl="triton")

    kernels = {launch.kernel.fn.__name__: launch.compile() for launch in launches}
    for kernel in kernels.values():
        kernel.assert_no_spills()
    choose = kernels["_choose_kernel"]
    assert choose.registers <= 64, "128 rows take more than one wave"
    # 8 tokens a thread; up to the reduction that asks whether one can win, every tile pays
    ends = [i for i, text in enumerate(choose.hot_loop()) if "BAR.SYNC" in text]
    assert ends[2] < 8 * 45, f"{ends[2]} instructions for 8 tokens"
    for name in ("_tile_kernel", "_cut_kernel", "_choose_kernel", "_best_kernel", "_scan_kernel"):
        kernels[name].assert_128bit_loads()


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator):
    rows = (ROWS * 8)[:100]
    limits = _limits(rows, cuda)
    first, second = (
        {"logits": 3 * torch.randn(100, 129280, device=cuda), **_seeds(100, generator, cuda)} for _ in range(2)
    )

    def op(logits, seeds, positions, temperature, top_p, top_k, min_p):
        token_ids = sample(logits, temperature, top_p, seeds, positions, top_k=top_k, min_p=min_p, impl="triton")
        return token_ids, *token_logprobs(logits, token_ids, 5, impl="triton")

    one, other = ((*each.values(), *limits.values()) for each in (first, second))
    assert_batch_invariant(op, one, batched=range(7), rows=[[0], [99], range(17), [5, 5, 31]])
    assert_graph_replays(op, one, other)


@pytest.mark.gpu
def test_tokens_are_those_of_the_reference_over_the_whole_vocabulary(cuda, generator):
    rows = ROWS * 4
    inputs = {"logits": 4 * torch.randn(len(rows), 129280, device=cuda), **_limits(rows, cuda)}
    where = _seeds(len(rows), generator, cuda)

    token_ids = sample(**inputs, **where, impl="triton")

    assert token_ids.tolist() == sample(**inputs, **where, impl="reference").tolist()
    at_home = {name: value.cpu() for name, value in {**inputs, **where}.items()}
    assert token_ids.tolist() == sample(**at_home, impl="reference").tolist()
