"""Rotary embedding: golden tables of spec 3.3 and the identities of a rotation."""

import pytest
import torch

from dsv4_kernels.rope import apply_rope_, plain_frequencies, rotations, yarn_frequencies

YARN_GOLDEN = {
    0: 1.0, 8: 0.05, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 24: 1.953125e-5, 25: 5.372313e-6,
    31: 5.680529e-7,
}  # fmt: skip
PLAIN_GOLDEN = {0: 1.0, 8: 0.1, 16: 0.01, 31: 1.333521e-4}


def _yarn():
    return yarn_frequencies(64, 160000.0, factor=16.0, original_positions=65536, beta_fast=32.0, beta_slow=1.0)


@pytest.mark.parametrize(("pair", "frequency"), YARN_GOLDEN.items())
def test_yarn_table_matches_the_golden_values(pair, frequency):
    assert _yarn()[pair].item() == pytest.approx(frequency, rel=1e-6)


@pytest.mark.parametrize(("pair", "frequency"), PLAIN_GOLDEN.items())
def test_plain_table_matches_the_golden_values(pair, frequency):
    assert plain_frequencies(64, 10000.0)[pair].item() == pytest.approx(frequency, rel=1e-6)


def test_pairs_are_interleaved_and_only_the_tail_turns():
    x = torch.randn(3, 2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    frequencies = plain_frequencies(8, 100.0)
    positions = torch.tensor([0, 7, 1000])

    turned = apply_rope_(x.clone(), rotations(positions, frequencies))

    assert torch.equal(turned[..., :12], x[..., :12])
    for i in range(4):
        a, b = x[..., 12 + 2 * i], x[..., 13 + 2 * i]
        angle = (positions.float() * frequencies[i])[:, None]
        torch.testing.assert_close(turned[..., 12 + 2 * i], a * angle.cos() - b * angle.sin())
        torch.testing.assert_close(turned[..., 13 + 2 * i], a * angle.sin() + b * angle.cos())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_the_inverse_rotation_undoes_the_rotation(dtype, num_tokens):
    x = torch.randn(num_tokens, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    cis = rotations(torch.arange(num_tokens) * 997, _yarn())

    back = apply_rope_(apply_rope_(x.clone(), cis), cis, inverse=True)

    # two roundings of a value of size up to 4: 2^-8 relative in bf16, 2^-23 in fp32
    torch.testing.assert_close(back, x, atol=4 * 2**-7 if dtype == torch.bfloat16 else 1e-6, rtol=0)
    assert back.dtype == dtype


def test_products_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 64, generator=generator), torch.randn(1, 64, generator=generator)
    frequencies = plain_frequencies(64, 10000.0)

    def product(q_position, k_position):
        turned = [
            apply_rope_(x.clone(), rotations(torch.tensor([p]), frequencies))
            for x, p in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(40, 3) == pytest.approx(product(1040, 1003), abs=1e-3)


def test_a_non_contiguous_row_is_rotated_in_place():
    wide = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(3))
    expected = apply_rope_(wide[:, 1].clone(), rotations(torch.arange(3), plain_frequencies(16, 10.0)))
    other = wide[:, 0].clone()

    apply_rope_(wide[:, 1], rotations(torch.arange(3), plain_frequencies(16, 10.0)))

    torch.testing.assert_close(wide[:, 1], expected)  # strided and dense rows may fuse their products differently
    assert torch.equal(wide[:, 0], other)


def test_rotations_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        apply_rope_(torch.zeros(2, 8), rotations(torch.arange(3), plain_frequencies(8, 10.0)))
