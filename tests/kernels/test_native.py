"""The C kernels equal the torch references, and a row's bits do not depend on the rows around it."""

import pytest
import torch

from dsv4_kernels.attention import BlockKeys, block_attention
from dsv4_kernels.compressor import pool_entries
from dsv4_kernels.gemm import pack_experts, pack_weight, packed_experts, packed_linear, shared_expert
from dsv4_kernels.indexer import index_scores, index_topk, select_topk
from dsv4_kernels.mhc import hc_head, hc_post, hc_post_, hc_pre
from dsv4_kernels.moe import grouped_experts, route_by_hash, route_by_score
from dsv4_kernels.rope import norm_rope, norm_rope_, plain_frequencies, rotations

DTYPES = [torch.bfloat16]
# One rounding of the result: 2^-8 relative in bf16; a differently ordered fp32 sum otherwise.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(*shape, generator=generator)


def close(actual, expected, dtype):
    torch.testing.assert_close(actual.float(), expected.float(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out", "k"), [(1, 16, 2), (7, 272, 34), (131, 208, 64), (16, 528, 256)])
def test_a_packed_product_equals_the_plain_one_and_rows_keep_their_bits(rows, out, k, dtype, randn):
    x, weight = randn(rows, k).to(dtype), (randn(out, k) * k**-0.5).to(dtype)

    y = packed_linear(x, pack_weight(weight), torch.float32)

    torch.testing.assert_close(y, (x.double() @ weight.double().T).float(), rtol=1e-5, atol=1e-5)
    for first, last in ((0, 1), (rows // 2, rows), (rows - 1, rows)):
        assert torch.equal(packed_linear(x[first:last], pack_weight(weight), torch.float32), y[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_grouped_product_equals_one_product_per_group(dtype, randn):
    x, weight = randn(5, 3 * 32).to(dtype), randn(3 * 16, 32).to(dtype)

    y = packed_linear(x, pack_weight(weight, num_groups=3))

    parts = [x[:, 32 * g : 32 * g + 32].float() @ weight[16 * g : 16 * g + 16].float().T for g in range(3)]
    close(y, torch.cat(parts, 1), dtype)


def test_shapes_without_a_packed_form_are_left_to_torch():
    assert pack_weight(torch.zeros(15, 8)) is None
    assert pack_weight(torch.zeros(16, 7)) is None
    assert pack_weight(torch.zeros(16, 8, dtype=torch.float64)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 7])
def test_hyper_connections_equal_the_reference(num_tokens, dtype, randn):
    x, y = randn(num_tokens, 4, 64).to(dtype), randn(num_tokens, 64).to(dtype)
    fn, scale, base, weight = randn(24, 256) * 0.1, randn(3), randn(24), randn(64)
    options = {"eps": 1e-3, "norm_eps": 0.1, "norm_weight": weight}  # apart, so that a swap shows

    native = hc_pre(x, fn, scale, base, num_iters=20, impl="native", **options)
    reference = hc_pre(x, fn, scale, base, num_iters=20, impl="reference", **options)

    for one, other in zip(native, reference, strict=True):
        close(one, other, dtype)
    _, post, comb = native
    close(hc_post(y, x, post, comb, impl="native"), hc_post(y, x, post, comb, impl="reference"), dtype)
    heads = [hc_head(x, fn[:4], scale[:1], base[:4], impl=impl, **options) for impl in ("native", "reference")]
    close(*heads, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_equal_the_reference_and_tokens_keep_their_bits(num_tokens, dtype, randn):
    w1, w3, w2 = (
        (randn(8, 32, 64) * 0.2).to(dtype),
        (randn(8, 32, 64) * 0.2).to(dtype),
        (randn(8, 64, 32) * 0.2).to(dtype),
    )
    x, ids = randn(num_tokens, 64).to(dtype), randn(num_tokens, 8).argsort(1)[:, :3].contiguous()
    weights = randn(num_tokens, 3).abs()
    packed = pack_experts(w1, w2, w3, 1.0)

    def run(rows):
        return packed_experts(
            x[rows], ids[rows], weights[rows], packed, first_expert=0, shared=None, out_dtype=torch.float32
        )

    expected = torch.zeros(num_tokens, 64)
    for choice in range(3):
        order = ids[:, choice].argsort(stable=True)
        counts = ids[:, choice].bincount(minlength=8).tolist()
        part = grouped_experts(
            x[order], weights[order, choice], counts, w1=w1, w2=w2, w3=w3, limit=1.0, impl="reference"
        )
        expected.index_add_(0, order, part)
    close(run(slice(None)), expected, dtype)
    assert torch.equal(run(slice(num_tokens - 1, None)), run(slice(None))[-1:])
    one = pack_experts(w1[:1], w2[:1], w3[:1], 1.0)
    alone = grouped_experts(x, torch.ones(num_tokens), [num_tokens], w1=w1[:1], w2=w2[:1], w3=w3[:1], limit=1.0)
    close(shared_expert(x, one), alone, dtype)


def test_fp4_experts_give_the_bits_of_their_bf16_form(randn):
    """Codes, signs and exponents of all sizes; one expert more that is no FP4 keeps the other stack in bf16."""

    def fp4(*shape):
        values = torch.tensor([0, -0.0, 0.5, -1, 1.5, 2, -3, 4, 6])[randn(*shape).abs().mul(4).long().clamp(max=8)]
        exponents = torch.exp2((randn(*shape[:-1], shape[-1] // 32) * 4 - 4).round()).repeat_interleave(32, -1)
        return (values * exponents).bfloat16()

    w1, w3, w2 = fp4(4, 96, 288), fp4(4, 96, 288), fp4(4, 288, 96)
    w1[0, 3, :32], w3[1, :, 32:64] = 0, 2.0**-100
    other = [torch.cat((w, randn(1, *w.shape[1:]).bfloat16())) for w in (w1, w2, w3)]
    codes, plain = pack_experts(w1, w2, w3, 10.0), pack_experts(*other, 10.0)
    assert codes.w1.is_fp4
    assert not plain.w1.is_fp4

    for num_tokens in (1, 2, 3, 5, 9, 150):
        x, ids = randn(num_tokens, 288).bfloat16(), randn(num_tokens, 4).argsort(1)[:, :2].contiguous()
        weights = randn(num_tokens, 2).abs()
        one, two = (
            packed_experts(x, ids, weights, packed, first_expert=0, shared=None, out_dtype=torch.float32)
            for packed in (codes, plain)
        )
        assert torch.equal(one, two), num_tokens


@pytest.mark.parametrize("num_tokens", [1, 8, 40])
def test_bits_do_not_depend_on_the_number_of_threads(num_tokens, randn):
    hidden, inter = 512, 256
    experts = pack_experts(
        *(randn(4, *shape).bfloat16() for shape in ((inter, hidden), (hidden, inter), (inter, hidden))), 9.0
    )
    weight, groups = pack_weight(randn(1024, hidden).bfloat16()), pack_weight(randn(512, 128).bfloat16(), num_groups=4)
    x, ids = randn(num_tokens, hidden).bfloat16(), randn(num_tokens, 4).argsort(1)[:, :2].contiguous()
    streams, fn, scale, base = randn(num_tokens, 4, hidden).bfloat16(), randn(24, 4 * hidden), randn(3), randn(24)

    def run(num_threads):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            return (
                packed_linear(x, weight),
                packed_linear(x, groups),
                packed_experts(x, ids, ids.float(), experts, first_expert=0, shared=None, out_dtype=torch.float32),
                *hc_pre(streams, fn, scale, base, num_iters=20, eps=1e-6, norm_eps=1e-6, impl="native"),
            )
        finally:
            torch.set_num_threads(before)

    assert all(torch.equal(one, other) for one, other in zip(run(1), run(3), strict=True))


def test_routing_equals_the_reference_ties_included(randn):
    logits, bias = (randn(50, 16) * 2).round(), randn(16).round()
    options = {"renormalise": True, "scaling": 1.5}

    native, reference = (route_by_score(logits, bias, 6, impl=impl, **options) for impl in ("native", "reference"))

    assert torch.equal(native[0], reference[0])
    torch.testing.assert_close(native[1], reference[1])
    by_hash = [route_by_hash(logits, reference[0], impl=impl, **options)[1] for impl in ("native", "reference")]
    torch.testing.assert_close(*by_hash)


@pytest.mark.parametrize("overlap", [True, False])
def test_pooled_entries_equal_the_reference(overlap, randn):
    kv, gate = randn(20, 64), randn(20, 64)
    rows = torch.arange(24).view(3, 8) - 4
    rows[rows < 0] = -1

    entries = [
        pool_entries(kv, gate, rows.clamp(max=19), overlap=overlap, impl=impl) for impl in ("native", "reference")
    ]

    torch.testing.assert_close(*entries)


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_scores_equal_the_reference(dtype, randn):
    q, keys, weights = randn(3, 6, 32).to(dtype), randn(9, 32).to(dtype), randn(3, 6)

    close(
        index_scores(q, keys, weights, impl="native"), index_scores(q, keys, weights, impl="reference"), torch.float32
    )


@pytest.mark.parametrize(("num_entries", "topk"), [(1, 4), (16, 16), (33, 1), (100, 8), (1000, 512), (5000, 100)])
def test_selection_equals_the_reference_ties_and_nan_included(num_entries, topk, randn):
    scores = randn(4, num_entries)
    scores[1] = scores[1].round()
    scores[2] *= 0
    scores[3, ::7] = float("nan")
    num_visible = torch.tensor([num_entries, num_entries // 2, num_entries + 3, num_entries - 1])

    native, reference = (select_topk(scores, num_visible, topk, impl=impl) for impl in ("native", "reference"))

    assert torch.equal(native, reference)


def test_tiles_of_queries_select_what_the_whole_selects(randn):
    q, keys, weights = randn(10, 16, 32).bfloat16(), randn(50, 32).bfloat16(), randn(10, 16)
    num_visible = torch.arange(41, 51)

    ids = index_topk(q, keys, weights, num_visible, 8)

    scores = index_scores(q, keys, weights)
    assert torch.equal(ids, select_topk(scores, num_visible, 8, impl="reference"))
    for t in range(10):
        row = slice(t, t + 1)
        assert torch.equal(index_topk(q[row], keys, weights[row], num_visible[row], 8), ids[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_rotation_in_one_pass_equal_the_reference(dtype, randn):
    x, weight = randn(3, 2, 64).to(dtype), randn(64)
    cis = rotations(torch.tensor([0, 7, 5000]), plain_frequencies(32, 10000.0))

    close(norm_rope(x, weight, 1e-6, cis, impl="native"), norm_rope(x, weight, 1e-6, cis, impl="reference"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_that_take_the_place_of_their_input_keep_their_bits(dtype, randn):
    x, y, post, comb = randn(5, 4, 64).to(dtype), randn(5, 64).to(dtype), randn(5, 4), randn(5, 4, 4)
    cis, weight = rotations(torch.arange(5), plain_frequencies(32, 10000.0)), randn(64)
    packed, out = pack_weight(randn(16, 64).to(dtype)), torch.empty(7, 16)

    mixed, turned = hc_post(y, x, post, comb), norm_rope(x, weight, 1e-6, cis)
    packed_linear(y, packed, torch.float32, out[:5])

    assert torch.equal(out[:5], packed_linear(y, packed, torch.float32))
    streams, rows = x.clone(), x.clone()
    assert torch.equal(hc_post_(y, streams, post, comb), mixed) and torch.equal(streams, mixed)
    assert torch.equal(norm_rope_(rows, weight, 1e-6, cis), turned) and torch.equal(rows, turned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_the_reference_and_queries_keep_their_bits_in_any_block(dtype, randn):
    num_tokens, window, start = 37, 20, 50
    keys, entries, q = randn(start + num_tokens, 32), randn(30, 32), randn(num_tokens, 3, 32)
    keys, entries, q, sink = keys.to(dtype), entries.to(dtype), q.to(dtype), randn(3)
    positions = torch.arange(start, start + num_tokens)
    num_visible = (positions + 1) // 4

    def run(block_tokens, impl):
        firsts = (torch.arange(start, start + num_tokens, block_tokens) - window + 1) // 16 * 16
        ids = firsts.unsqueeze(1) + torch.arange(-(-(window + block_tokens + 14) // 16) * 16)
        ids = torch.where(ids < keys.shape[0], ids, -1)
        listed = torch.nn.functional.pad(torch.arange(30), (0, 2), value=-1)
        seen = BlockKeys(block_tokens, positions, keys, ids, firsts, window, entries, listed, num_visible)
        return block_attention(q, seen, sink=sink, scale=0.2, impl=impl)

    close(run(16, "native"), run(1, "reference"), dtype)
    assert torch.equal(run(16, "native"), run(1, "native"))
    assert torch.equal(run(8, "native"), run(1, "native"))
