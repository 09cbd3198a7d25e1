"""Hyper-connections: golden Sinkhorn matrix of spec 4.2 and its direction."""

import pytest
import torch

from dsv4_kernels.mhc import hc_head, hc_post, hc_pre, sinkhorn

# Far apart and far from nothing, so that one in the other's place shows.
EPS, NORM_EPS = 1e-3, 0.1

GOLDEN_LOGITS = [[2.0, 0, 0, -1], [0, 1, -2, 0], [1, 0, 3, 0], [0, -1, 0, 2]]
GOLDEN_MATRIX = [
    [0.6824, 0.1776, 0.0996, 0.0404],
    [0.1322, 0.6913, 0.0193, 0.1572],
    [0.0989, 0.0700, 0.7879, 0.0432],
    [0.0864, 0.0612, 0.0932, 0.7592],
]
GOLDEN_STREAMS = [1.5894, 2.0147, 2.8747, 3.5212]


def _parameters(streams, hidden, generator):
    num_mixes = (2 + streams) * streams
    fn = torch.randn(num_mixes, streams * hidden, generator=generator)
    return fn, torch.randn(3, generator=generator), torch.randn(num_mixes, generator=generator)


def test_sinkhorn_matches_the_golden_matrix():
    matrix = sinkhorn(torch.tensor([GOLDEN_LOGITS]), 20, 1e-6)

    torch.testing.assert_close(matrix[0], torch.tensor(GOLDEN_MATRIX), atol=6e-5, rtol=0)  # printed to 4 digits


def test_streams_mix_over_the_first_index():
    comb = sinkhorn(torch.tensor([GOLDEN_LOGITS]), 20, 1e-6)
    streams = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)

    mixed = hc_post(torch.zeros(1, 1), streams, torch.zeros(1, 4), comb)

    torch.testing.assert_close(mixed.flatten(), torch.tensor(GOLDEN_STREAMS), atol=6e-5, rtol=0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_columns_sum_to_one(scale):
    logits = torch.randn(257, 4, 4, generator=torch.Generator().manual_seed(0)) * scale

    matrix = sinkhorn(logits, 20, 1e-6)

    assert (matrix.sum(1) - 1).abs().max() < 1e-4
    assert (matrix > 0).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_mixing_follows_the_formula(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 4, 24, generator=generator)
    fn, scale, base = _parameters(4, 24, generator)

    y, post, comb = hc_pre(x, fn, scale, base, num_iters=20, eps=EPS, norm_eps=NORM_EPS)

    assert y.shape == (num_tokens, 24) and post.shape == (num_tokens, 4) and comb.shape == (num_tokens, 4, 4)
    for t in range(num_tokens):
        flat = x[t].reshape(-1).double()
        mix = (fn.double() @ flat) / (flat.square().mean() + NORM_EPS).sqrt()
        pre = torch.sigmoid(mix[:4] * scale[0] + base[:4]) + EPS
        torch.testing.assert_close(y[t], (pre[:, None] * x[t]).sum(0).float(), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(post[t], (2 * torch.sigmoid(mix[4:8] * scale[1] + base[4:8])).float())
        logits = (mix[8:] * scale[2] + base[8:]).view(1, 4, 4).float()
        torch.testing.assert_close(comb[t], sinkhorn(logits, 20, EPS)[0], atol=1e-5, rtol=1e-4)


def test_post_adds_the_weighted_output_to_every_stream():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 4, 8, generator=generator), torch.randn(3, 8, generator=generator)
    post, comb = torch.rand(3, 4, generator=generator), torch.rand(3, 4, 4, generator=generator)

    mixed = hc_post(y, x, post, comb)

    for k in range(4):
        expected = post[:, k, None] * y + sum(comb[:, j, k, None] * x[:, j] for j in range(4))
        torch.testing.assert_close(mixed[:, k], expected)


def test_head_collapses_without_a_mixing_matrix():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 4, 8, generator=generator)
    fn, scale, base = torch.randn(4, 32, generator=generator), torch.tensor([0.7]), torch.randn(4, generator=generator)

    z = hc_head(x, fn, scale, base, eps=EPS, norm_eps=NORM_EPS)

    flat = x.flatten(1)
    mix = flat @ fn.T * torch.rsqrt(flat.square().mean(1, keepdim=True) + NORM_EPS)
    pre = torch.sigmoid(mix * 0.7 + base) + EPS
    torch.testing.assert_close(z, (pre.unsqueeze(-1) * x).sum(1))


def test_bf16_streams_are_mixed_in_fp32_and_cast_once():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 4, 16, generator=generator).bfloat16()
    y = torch.randn(5, 16, generator=generator).bfloat16()
    fn, scale, base = _parameters(4, 16, generator)

    _, post, comb = hc_pre(x, fn, scale, base, num_iters=20, eps=1e-6, norm_eps=1e-6)

    assert post.dtype == comb.dtype == torch.float32
    assert torch.equal(hc_post(y, x, post, comb), hc_post(y.float(), x.float(), post, comb).bfloat16())


def test_a_projection_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"expected \(24, 32\)"):
        hc_pre(torch.zeros(1, 4, 8), torch.zeros(24, 31), torch.ones(3), torch.zeros(24),
               num_iters=1, eps=1e-6, norm_eps=1e-6)  # fmt: skip
