"""The packed FP4 layout: every code, scale and position comes back, and what does not fold is kept as it is."""

import pytest
import torch

from dsv4_kernels.moe.fp4 import Fp4LayoutError, can_pack, pack_fp4_experts, unpack_fp4
from dsv4_kernels.quant import dequantise_fp4


def _matrices(generator, num_experts, hidden, intermediate, lowest=118, highest=129):
    def one(rows, columns):
        shape = (num_experts, rows)
        values = torch.randint(0, 256, (*shape, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(lowest, highest + 1, (*shape, columns // 32), generator=generator, dtype=torch.uint8)
        return values, scales

    return one(intermediate, hidden), one(hidden, intermediate), one(intermediate, hidden)


def _in_tiles(w1, w3):
    """Rows of w13 in the order of its tiles."""
    gate, up = dequantise_fp4(*w1), dequantise_fp4(*w3)
    return torch.stack((gate.unflatten(1, (-1, 128)), up.unflatten(1, (-1, 128))), 2).flatten(1, 3)


@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 128), (256, 384)])
@pytest.mark.parametrize(("lowest", "highest", "is_folded"), [(118, 129, True), (117, 129, False), (0, 254, False)])
def test_packing_loses_nothing(generator, hidden, intermediate, lowest, highest, is_folded):
    w1, w2, w3 = _matrices(generator, 2, hidden, intermediate, lowest, highest)

    experts = pack_fp4_experts(w1, w2, w3, 10.0)

    assert experts.w13.is_folded == experts.w2.is_folded == is_folded
    assert torch.equal(unpack_fp4(experts.w13), _in_tiles(w1, w3))
    assert torch.equal(unpack_fp4(experts.w2), dequantise_fp4(*w2))
    assert (experts.hidden_size, experts.intermediate_size, experts.num_experts) == (hidden, intermediate, 2)


def test_scales_of_all_zero_groups_do_not_count(generator):
    w1, w2, w3 = _matrices(generator, 1, 128, 128)
    w2[1][0, 5, 2] = 0
    w2[0][0, 5, 32:48] = 0x80  # 0 and -0

    experts = pack_fp4_experts(w1, w2, w3, 10.0)

    assert experts.w2.is_folded
    assert torch.equal(unpack_fp4(experts.w2), dequantise_fp4(*w2))


def test_an_all_zero_matrix_folds():
    zero = torch.zeros(1, 128, 64, dtype=torch.uint8), torch.zeros(1, 128, 4, dtype=torch.uint8)

    experts = pack_fp4_experts(zero, zero, zero, 10.0)

    assert experts.w2.is_folded and not unpack_fp4(experts.w2).any()


def test_scales_near_the_end_of_fp32_are_kept_as_they_are(generator):
    w1, w2, w3 = _matrices(generator, 1, 128, 128, 0, 6)

    experts = pack_fp4_experts(w1, w2, w3, 10.0)

    assert not experts.w2.is_folded
    assert torch.equal(unpack_fp4(experts.w2), dequantise_fp4(*w2))


def test_the_packed_form_has_the_size_of_the_checkpoint(generator):
    w1, w2, w3 = _matrices(generator, 2, 256, 128)
    experts = pack_fp4_experts(w1, w2, w3, 10.0)

    stored = sum(t.numel() for pair in (w1, w2, w3) for t in pair)
    tile_exponents = 4 * (experts.w13.block_exponent.numel() + experts.w2.block_exponent.numel())
    assert experts.w13.num_bytes + experts.w2.num_bytes == stored + tile_exponents


@pytest.mark.parametrize(("hidden", "intermediate", "fits"), [(4096, 2048, True), (4096, 192, False), (64, 128, False)])
def test_sizes_that_are_not_whole_tiles_are_refused(generator, hidden, intermediate, fits):
    assert can_pack(hidden, intermediate) == fits
    if not fits:
        with pytest.raises(Fp4LayoutError, match="multiples of 128"):
            pack_fp4_experts(*_matrices(generator, 1, hidden, intermediate), 10.0)


def test_a_nan_scale_is_refused(generator):
    w1, w2, w3 = _matrices(generator, 1, 128, 128)
    w3[1][0, 7, 1] = 255

    with pytest.raises(Fp4LayoutError, match="NaN"):
        pack_fp4_experts(w1, w2, w3, 10.0)
