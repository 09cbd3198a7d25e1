"""Hyper-connections in Triton: interpreted against the formula, compiled for sm_90a, and on the GPU."""

import pytest
import torch

from dsv4_kernels.mhc import hc_head, hc_post, hc_post_pre, hc_pre, reference
from dsv4_kernels.quant import quantise_fp8
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
)
from tests.kit.sm90a import recorded_launches

EPS, NORM_EPS, ITERS = 1e-3, 0.1, 20  # eps far apart, so that one in the other's place shows
HALF, ULP = unit_roundoff(torch.bfloat16), unit_roundoff(torch.float32)
# fn enters with 16 of 24 bits: 2^-17 per term; the sums are of fp32. Mixes are O(1), and sigmoid, softmax and Sinkhorn
# have slopes of at most 1 there.
MIX = 2.0**-15


def _streams(num_tokens, dim, generator, device):
    x = torch.randn(num_tokens, 4, dim, generator=generator).bfloat16()
    y = torch.randn(num_tokens, dim, generator=generator).bfloat16()
    post = 2 * torch.rand(num_tokens, 4, generator=generator)
    comb = reference.sinkhorn(torch.randn(num_tokens, 4, 4, generator=generator), ITERS, EPS)
    return tuple(value.to(device) for value in (y, x, post, comb))


def _parameters(rows, dim, generator, device):
    fn = torch.randn(rows, 4 * dim, generator=generator) * (4 * dim) ** -0.5
    scale, base = torch.rand(3 if rows > 4 else 1, generator=generator), torch.randn(rows, generator=generator)
    return tuple(value.to(device) for value in (fn, scale, base))


def _weight(dim, generator, device):
    return (1 + 0.1 * torch.randn(dim, generator=generator)).to(device)


def _expected_pre(x, fn, scale, base, weight):
    y, post, comb = hc_pre(
        x.float(), fn, scale, base, num_iters=ITERS, eps=EPS, norm_eps=NORM_EPS, norm_weight=weight, impl="reference"
    )
    return y.double(), post.double(), comb.double()


def _collapse_bound(x, weight):
    """Error of the collapsed row before the norm: its coefficients', and a rounding each before and behind the norm."""
    per_channel = x.double().abs().sum(1) * MIX  # [T, D]
    scale = torch.rsqrt(x.double().square().mean((1, 2), keepdim=False))[:, None]  # the norm divides by about this
    return 4 * per_channel * scale * weight.double().abs()


@pytest.mark.parametrize(("num_tokens", "dim"), [(0, 256), (1, 384), (3, 1024), (17, 200), (65, 256)])
def test_post_and_pre_follow_the_formula(triton_device, generator, num_tokens, dim):
    y, x, post, comb = _streams(num_tokens, dim, generator, triton_device)
    fn, scale, base = _parameters(24, dim, generator, triton_device)
    weight = _weight(dim, generator, triton_device)

    with guarded_allocations():
        mixed = hc_post_pre(y, x, post, comb, fn, scale, base, num_iters=ITERS, eps=EPS, norm_eps=NORM_EPS,
                            norm_weight=weight, impl="triton")  # fmt: skip

    assert_fully_written(mixed.x, mixed.y, mixed.post, mixed.comb)
    wide = reference.hc_post(y.float(), x.float(), post, comb).double()
    magnitude = reference.hc_post(y.float().abs(), x.float().abs(), post, comb)  # 5 products and sums, here and there
    assert_within(mixed.x, wide, magnitude * 20 * ULP + wide.abs() * HALF)
    expected_y, expected_post, expected_comb = _expected_pre(mixed.x, fn, scale, base, weight)
    bound = expected_y.abs() * 3 * HALF + _collapse_bound(mixed.x, weight)
    assert_within(mixed.y, expected_y, bound)
    assert_within(mixed.post, expected_post, 2 * MIX)
    assert_within(mixed.comb, expected_comb, 2 * MIX)


def test_each_half_alone_gives_the_bits_of_the_fused_form(triton_device, generator):
    y, x, post, comb = _streams(5, 256, generator, triton_device)
    fn, scale, base = _parameters(24, 256, generator, triton_device)
    options = {"num_iters": ITERS, "eps": EPS, "norm_eps": NORM_EPS, "norm_weight": _weight(256, generator, x.device)}

    fused = hc_post_pre(y, x, post, comb, fn, scale, base, **options, quantise=True, impl="triton")

    with guarded_allocations():
        streams = hc_post(y, x, post, comb, impl="triton")
        halves = hc_pre(streams, fn, scale, base, **options, impl="triton")
    assert torch.equal(streams, fused.x)
    for half, whole in zip(halves, (fused.y, fused.post, fused.comb), strict=True):
        assert torch.equal(half, whole)


@pytest.mark.parametrize("dim", [128, 384])
def test_quantised_rows_are_those_of_the_quantiser(triton_device, generator, dim):
    y, x, post, comb = _streams(4, dim, generator, triton_device)
    x[0], y[0] = 0, 0  # a group without any value has the scale of the floor
    fn, scale, base = _parameters(24, dim, generator, triton_device)

    with guarded_allocations():
        mixed = hc_post_pre(y, x, post, comb, fn, scale, base, num_iters=ITERS, eps=EPS, norm_eps=NORM_EPS,
                            norm_weight=_weight(dim, generator, x.device), quantise=True, impl="triton")  # fmt: skip

    values, scales = quantise_fp8(mixed.y, 128)
    assert torch.equal(mixed.scales, scales)
    assert torch.equal(mixed.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("num_tokens", [0, 1, 18])
def test_head_collapses_without_a_mixing_matrix(triton_device, generator, num_tokens):
    _, x, _, _ = _streams(num_tokens, 384, generator, triton_device)
    fn, scale, base = _parameters(4, 384, generator, triton_device)
    weight = _weight(384, generator, triton_device)

    with guarded_allocations():
        z = hc_head(x, fn, scale, base, eps=EPS, norm_eps=NORM_EPS, norm_weight=weight, impl="triton")

    assert_fully_written(z)
    expected = hc_head(
        x.float(), fn, scale, base, eps=EPS, norm_eps=NORM_EPS, norm_weight=weight, impl="reference"
    ).double()
    assert_within(z, expected, expected.abs() * 3 * HALF + _collapse_bound(x, weight))


def test_a_non_contiguous_input_gives_the_same_bits(triton_device, generator):
    y, x, post, comb = _streams(3, 256, generator, triton_device)
    strided = x.repeat_interleave(2, dim=2)[:, :, ::2]

    assert torch.equal(hc_post(y, strided, post, comb, impl="triton"), hc_post(y, x, post, comb, impl="triton"))


@pytest.mark.parametrize("dim", [4096, 7168])
@pytest.mark.parametrize("num_tokens", [1, 8192])
def test_compiles_for_hopper_with_wide_loads_and_without_spills(dim, num_tokens):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16 = torch.bfloat16
    with recorded_launches() as launches:
        hc_post_pre(
            meta(num_tokens, dim, dtype=bf16), meta(num_tokens, 4, dim, dtype=bf16), meta(num_tokens, 4),
            meta(num_tokens, 4, 4), meta(24, 4 * dim), meta(3), meta(24), num_iters=ITERS, eps=EPS, norm_eps=NORM_EPS,
            norm_weight=meta(dim), quantise=True, impl="triton",
        )  # fmt: skip

    for launch in launches:
        kernel = launch.compile()
        kernel.assert_no_spills()
        kernel.assert_128bit_loads()


@pytest.mark.gpu
def test_tokens_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator):
    dim = 4096
    first, second = (_streams(130, dim, generator, cuda) for _ in range(2))
    fn, scale, base = _parameters(24, dim, generator, cuda)
    weight = _weight(dim, generator, cuda)

    def op(y, x, post, comb, fn, scale, base, weight):
        mixed = hc_post_pre(y, x, post, comb, fn, scale, base, num_iters=ITERS, eps=EPS, norm_eps=NORM_EPS,
                            norm_weight=weight, quantise=True, impl="triton")  # fmt: skip
        return mixed.x, mixed.y, mixed.post, mixed.comb, mixed.values.view(torch.uint8), mixed.scales

    parameters = (fn, scale, base, weight)
    rows = [[0], [129], range(16), range(63), range(100), [5, 5, 77]]
    assert_batch_invariant(op, (*first, *parameters), batched=[0, 1, 2, 3], rows=rows)
    assert_graph_replays(op, (*first, *parameters), (*second, *parameters))
