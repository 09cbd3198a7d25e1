"""RMSNorm: the formula, one cast, no surprises at the edges."""

import pytest
import torch

from dsv4_kernels.norm import rms_norm, rms_norm_fp8
from dsv4_kernels.quant import quantise_fp8


@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 3, 16)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_scaled_to_unit_mean_square_then_weighted(shape, weighted):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    weight = torch.randn(16, generator=generator) if weighted else None

    y = rms_norm(x, weight, 1e-6)

    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = expected if weight is None else expected * weight
    torch.testing.assert_close(y, expected.float())


def test_bf16_input_is_normalised_and_weighted_in_fp32_with_one_cast():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(8, 64, generator=generator).bfloat16(), torch.randn(64, generator=generator)

    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight, 1e-6).bfloat16())


def test_a_zero_row_stays_zero_and_the_input_is_not_changed():
    x = torch.zeros(2, 8)
    x[1] = 3.0
    before = x.clone()

    y = rms_norm(x, torch.ones(8), 1e-6)

    assert torch.equal(y[0], torch.zeros(8))
    assert torch.equal(x, before)


def test_a_non_contiguous_input_gives_the_same_values():
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(2)).T

    # the layout changes the order of the fp32 sum, hence its last bit
    torch.testing.assert_close(rms_norm(x, None, 1e-6), rms_norm(x.contiguous(), None, 1e-6))


def test_a_weight_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"expected \(8,\)"):
        rms_norm(torch.zeros(1, 8), torch.ones(9), 1e-6)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_rows_for_an_fp8_product_are_the_rounded_norm_quantised(impl):
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(5, 256, generator=generator).bfloat16(), torch.randn(256, generator=generator)

    rows = rms_norm_fp8(x, weight, 1e-6, impl=impl)

    values, scales = quantise_fp8(rms_norm(x, weight, 1e-6, impl=impl), 128)
    assert torch.equal(rows.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(rows.scales, scales)


@pytest.mark.parametrize("shape", [(2, 100), (256,), (1, 2, 128)])
def test_rows_that_are_no_whole_groups_are_refused(shape):
    with pytest.raises(ValueError, match="multiple of 128"):
        rms_norm_fp8(torch.zeros(shape), None, 1e-6)
