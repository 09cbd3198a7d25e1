"""Number formats: golden scales and codes of spec 2.2, 2.3 and 3.2, and round trips."""

import pytest
import torch

from dsv4_kernels import quant

FP8_SCALES = [(0.0, 105), (1e-5, 105), (0.3, 117), (1.0, 119), (448.0, 127), (449.0, 128)]
FP4_SCALES = [(0.5, 124), (6.0, 127), (6.1, 128), (0.0, 1)]
E2M1_TIES = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]


@pytest.mark.parametrize(("amax", "byte"), FP8_SCALES)
def test_fp8_scale_is_the_power_of_two_above_amax_over_448(amax, byte):
    group = torch.zeros(1, 64)
    group[0, 17] = -amax

    _, code = quant.quantise_fp8(group, 64)

    assert code.tolist() == [[byte]]


@pytest.mark.parametrize(("amax", "byte"), FP4_SCALES)
def test_fp4_scale_is_the_power_of_two_above_amax_over_6(amax, byte):
    group = torch.zeros(1, 32)
    group[0, 3] = amax

    _, code = quant.quantise_fp4(group)

    assert code.tolist() == [[byte]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("value", "rounded"), E2M1_TIES)
def test_e2m1_ties_go_to_the_even_code(value, rounded, sign):
    assert quant.decode_e2m1(quant.encode_e2m1(torch.tensor([sign * value]))).tolist() == [sign * rounded]


def test_e2m1_rounds_to_the_nearest_and_saturates():
    x = torch.linspace(-7, 7, 2801)
    x = x[(x.abs() * 4) % 1 != 0]  # without the ties
    table = quant.decode_e2m1(torch.arange(16))

    nearest = table[(x[:, None] - table).abs().argmin(1)]

    assert torch.equal(quant.decode_e2m1(quant.encode_e2m1(x)).abs(), nearest.abs())


def test_e2m1_byte_0xb7_is_6_then_minus_1_5():
    packed = torch.tensor([0xB7], dtype=torch.uint8)

    assert quant.decode_e2m1(quant.unpack_e2m1(packed)).tolist() == [6.0, -1.5]
    assert quant.decode_e2m1(quant.unpack_e2m1(packed.view(torch.int8))).tolist() == [6.0, -1.5]


def test_all_e2m1_bytes_survive_unpacking_and_packing():
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)

    assert torch.equal(quant.pack_e2m1(quant.unpack_e2m1(packed)), packed)


def test_ue8m0_decodes_as_the_native_type_does():
    code = torch.arange(256, dtype=torch.uint8)

    value = quant.decode_ue8m0(code)

    assert torch.equal(value[:255], code[:255].view(torch.float8_e8m0fnu).float())
    assert value[255].isnan()
    assert torch.equal(quant.decode_ue8m0(code.view(torch.float8_e8m0fnu))[:255], value[:255])


def test_ue8m0_encodes_exact_powers_as_themselves_and_rounds_others_up():
    powers = 2.0 ** torch.arange(-126, 127, dtype=torch.float32)

    code = quant.encode_ue8m0(powers)

    assert torch.equal(quant.decode_ue8m0(code), powers)
    assert torch.equal(quant.encode_ue8m0(torch.nextafter(powers, powers * 2)), code + 1)
    assert quant.encode_ue8m0(torch.tensor([float("nan"), float("inf")])).tolist() == [255, 255]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_fp8_round_trip_keeps_each_value_within_half_a_step(dtype, group):
    x = (torch.randn(5, 256, generator=torch.Generator().manual_seed(group)) * 30).to(dtype)

    values, code = quant.quantise_fp8(x, group)
    back = quant.dequantise_fp8(values, code, dtype)

    scale = quant.decode_ue8m0(code).repeat_interleave(group, dim=1)
    # e4m3: 3 mantissa bits, so half a step is 2^-4 relative; below 2^-6 the step is fixed at 2^-9.
    bound = torch.maximum(x.float().abs() * 2**-4, scale * 2**-10)
    assert ((back.float() - x.float()).abs() <= bound).all()
    assert back.dtype == dtype


@pytest.mark.parametrize("shape", [(0, 512), (1, 512), (3, 4, 512)])
def test_fake_quantisation_of_kv_is_idempotent_and_only_rounds_the_rotary_tail(shape):
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3

    once = quant.fake_quant_kv(kv, 64)

    assert torch.equal(quant.fake_quant_kv(once, 64), once)
    assert torch.equal(once[..., 448:], kv[..., 448:].bfloat16().float())
    values, code = quant.quantise_fp8(kv[..., :448], 64)
    assert code.shape[-1] == 7
    assert torch.equal(once[..., :448], quant.dequantise_fp8(values, code))


def test_fake_quantisation_accepts_a_non_contiguous_row():
    wide = torch.randn(4, 1024, generator=torch.Generator().manual_seed(2))

    assert torch.equal(quant.fake_quant_kv(wide[:, ::2], 64), quant.fake_quant_kv(wide[:, ::2].contiguous(), 64))


def test_index_fp8_has_one_power_of_two_scale_per_row():
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    x[2] = 0.0

    values, scale = quant.quantise_index_fp8(x)

    assert scale.shape == (6,) and scale.dtype == torch.float32
    assert torch.equal(torch.frexp(scale).mantissa, torch.full((6,), 0.5))
    assert scale[2] == 2.0**-22
    assert torch.equal(quant.fake_quant_index(x, "fp8"), quant.dequantise_index_fp8(values, scale))


def test_fake_quantisation_of_the_indexer_follows_its_precision():
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(4))
    packed, code = quant.quantise_fp4(x)

    assert quant.fake_quant_index(x, "auto") is x
    assert torch.equal(quant.fake_quant_index(x, "fp4"), quant.dequantise_fp4(packed, code))
    with pytest.raises(ValueError, match="'int8'"):
        quant.fake_quant_index(x, "int8")


@pytest.mark.parametrize("offset", [(0, 0), (5, 0), (0, 127), (100, 60)])
def test_block_dequantisation_of_a_slice_equals_the_slice_of_the_whole(offset):
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(300, 260, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 134, (3, 3), generator=generator, dtype=torch.uint8)
    whole = quant.dequantise_block_fp8(values, scale)
    rows, columns = slice(128 + offset[0], 290), slice(offset[1], 250)

    part = quant.dequantise_block_fp8(values[rows, columns], scale[1:3, :2], offset=offset)

    assert torch.equal(part, whole[rows, columns])
    assert whole[299, 259] == values[299, 259].float() * 2.0 ** (int(scale[2, 2]) - 127)


def test_block_dequantisation_refuses_scales_that_do_not_cover():
    with pytest.raises(ValueError, match=r"expected \(2, 1\)"):
        quant.dequantise_block_fp8(torch.zeros(129, 128, dtype=torch.float8_e4m3fn), torch.ones(1, 1))


def test_mxfp4_weights_read_low_nibble_first_with_one_scale_per_32():
    packed = torch.zeros(2, 32, dtype=torch.int8)
    packed[1, 16] = -73  # 0xB7
    scale = torch.tensor([[127, 127], [127, 129]], dtype=torch.uint8)

    weight = quant.dequantise_fp4(packed, scale)

    assert weight.shape == (2, 64)
    assert weight[1, 32:34].tolist() == [24.0, -6.0]
    assert torch.count_nonzero(weight) == 2


@pytest.mark.parametrize("call", [lambda x: quant.quantise_fp8(x, 64), lambda x: quant.quantise_fp4(x, 32)])
def test_a_dim_that_is_no_multiple_of_the_group_is_refused(call):
    with pytest.raises(ValueError, match="100"):
        call(torch.zeros(2, 100))
