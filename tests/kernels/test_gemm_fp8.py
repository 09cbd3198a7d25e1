"""The block-scaled FP8 product against the formula: interpreted, compiled for sm_90a, and on the GPU."""

import pytest
import torch

from dsv4_kernels.gemm.fp8 import Fp8Weight, fp8_linear, make_fp8_weight
from dsv4_kernels.gemm.fp8.triton_impl import MAX_STREAM_ROWS, Config, num_parts
from dsv4_kernels.gemm.fp8.triton_impl import fp8_linear as run_triton
from dsv4_kernels.quant import Fp8Rows, dequantise_block_fp8, dequantise_fp8, quantise_fp8
from dsv4_kernels.testing import assert_within, relative_error, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
    same_bits,
)
from tests.kit.sm90a import recorded_launches

# The tensor core cuts each of the 33 addends of an instruction at 2^-13 of the largest: over the four instructions of a
# block 66 such units on average. The largest of 128 random products is about 1/20 of the sum of magnitudes; together
# 2^-11.3 of that sum. Seen on an H200: up to 2^-11.8. Twice the average is the bound.
_PRODUCT_ERROR = {"cpu": 2.0**-20, "cuda": 2.0**-10.3}


def _weight(num_rows, num_columns, generator, device, num_groups=1):
    values = torch.randn(num_groups * num_rows, num_columns, generator=generator).to(torch.float8_e4m3fn)
    shape = (num_groups * num_rows // 128, num_columns // 128)
    scales = torch.randint(110, 124, shape, generator=generator, dtype=torch.uint8)
    return make_fp8_weight(values.to(device), scales.to(device), num_groups=num_groups)


def _check(y, rows, weight):
    """Every element within the derived bound of the fp64 product."""
    x = dequantise_fp8(rows.values, rows.scales).double().unflatten(1, (weight.num_groups, -1))
    w = dequantise_block_fp8(weight.values, weight.scales).double().unflatten(0, (weight.num_groups, -1))
    expected = torch.einsum("tgk,gnk->tgn", x, w).flatten(1)
    magnitude = torch.einsum("tgk,gnk->tgn", x.abs(), w.abs()).flatten(1)
    bound = expected.abs() * unit_roundoff(y.dtype) + magnitude * _PRODUCT_ERROR[y.device.type]
    assert_within(y, expected, bound * (1 + unit_roundoff(torch.bfloat16)))


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_columns", "num_groups"),
    [(0, 128, 128, 1), (1, 128, 896, 1), (17, 256, 128, 1), (3, 128, 256, 3), (130, 256, 256, 1), (70, 128, 128, 2)],
)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_the_product_equals_the_formula_in_fp64(
    triton_device, generator, impl, num_tokens, num_rows, num_columns, num_groups, out_dtype
):
    weight = _weight(num_rows, num_columns, generator, triton_device, num_groups)
    x = torch.randn(num_tokens, num_groups * num_columns, generator=generator).bfloat16().to(triton_device)
    rows = Fp8Rows(*quantise_fp8(x, 128, impl="reference"))

    with guarded_allocations():
        y = fp8_linear(rows, weight, out_dtype=out_dtype, impl=impl)

    assert y.dtype == out_dtype
    assert_fully_written(y)
    _check(y, rows, weight)
    assert not weight.arrivals.any()


def test_rows_that_are_quantised_on_the_way_give_the_same_bits(triton_device, generator):
    weight = _weight(128, 256, generator, triton_device)
    x = torch.randn(5, 256, generator=generator).to(triton_device)

    y = fp8_linear(x, weight, impl="triton")

    assert same_bits(y, fp8_linear(Fp8Rows(*quantise_fp8(x, 128)), weight, impl="triton"))


@pytest.mark.parametrize(("num_tokens", "rows"), [(40, [[0], [39, 2, 2]]), (140, [[139, *range(80)]])])
def test_a_row_has_the_same_bits_in_any_batch_of_its_range(triton_device, generator, num_tokens, rows):
    weight = _weight(128, 640, generator, triton_device)
    x = torch.randn(num_tokens, 640, generator=generator).to(triton_device)

    assert num_parts(weight) > 1 and MAX_STREAM_ROWS == 64
    assert_batch_invariant(lambda x: fp8_linear(x, weight, impl="triton"), (x,), batched=[0], rows=rows)


@pytest.mark.parametrize("config", [Config(halves=2), Config(tile_rows=64, halves=2, num_warps=4)])
@pytest.mark.parametrize("num_rows", [128, 512])
def test_every_tile_gives_the_same_bits(triton_device, generator, config, num_rows):
    weight = _weight(num_rows, 256, generator, triton_device)
    rows = Fp8Rows(*quantise_fp8(torch.randn(150, 256, generator=generator).to(triton_device), 128))

    y = run_triton(rows.values, rows.scales, weight, torch.bfloat16, config)

    assert same_bits(y, fp8_linear(rows, weight, impl="triton"))


def test_fp32_scales_that_are_no_powers_of_two_are_kept(triton_device, generator):
    values = torch.randn(128, 256, generator=generator).to(torch.float8_e4m3fn).to(triton_device)
    weight = make_fp8_weight(values, torch.rand(1, 2, generator=generator).to(triton_device) + 0.1)
    rows = Fp8Rows(*quantise_fp8(torch.randn(4, 256, generator=generator).to(triton_device), 128))

    _check(fp8_linear(rows, weight, impl="triton"), rows, weight)


def test_shapes_that_disagree_are_refused(generator):
    weight = _weight(128, 256, generator, "cpu")

    with pytest.raises(ValueError, match="expected 256 columns"):
        fp8_linear(torch.zeros(1, 128), weight)
    with pytest.raises(ValueError, match="blocks are 128 x 128"):
        make_fp8_weight(torch.zeros(192, 128).to(torch.float8_e4m3fn), torch.ones(2, 1))
    with pytest.raises(ValueError, match="scales are"):
        make_fp8_weight(torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(2, 1))


@pytest.mark.parametrize("shape", [(0, 128), (3, 128), (2, 3, 4096), (5, 896)])
@pytest.mark.parametrize("group", [128, 64])
def test_quantised_rows_are_the_reference_s_bit_for_bit(triton_device, generator, shape, group):
    x = torch.randn(shape, generator=generator) * torch.logspace(-9, 3, shape[-1])
    x[..., :group] = 0.0
    x = x.bfloat16().to(triton_device)

    with guarded_allocations():
        values, codes = quantise_fp8(x, group, impl="triton")

    expected_values, expected_codes = quantise_fp8(x, group, impl="reference")
    assert same_bits(values, expected_values) and same_bits(codes, expected_codes)


def _meta_weight(num_rows, num_columns, num_groups=1):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    return Fp8Weight(
        meta(num_groups * num_rows, num_columns, dtype=torch.float8_e4m3fn),
        meta(num_groups * num_rows // 128, num_columns // 128), num_groups,
        meta(num_groups * num_rows // 64, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize(("num_tokens", "weight"), [(16, (1536, 4096)), (64, (1024, 4096, 8)), (4096, (4096, 8192))])
def test_compiles_for_hopper(num_tokens, weight):
    weight = _meta_weight(*weight)
    x = torch.empty(num_tokens, weight.num_groups * weight.values.shape[1], dtype=torch.bfloat16, device="meta")
    with recorded_launches() as launches:
        fp8_linear(Fp8Rows(*quantise_fp8(x, 128, impl="triton")), weight, impl="triton")

    for launch in launches:
        launch.compile().assert_no_spills()
        launch.compile().assert_128bit_loads()
    launches[1].compile().assert_tensor_core("QGMMA")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(1536, 4096, 1), (4096, 8192, 1), (1024, 4096, 8)])
@pytest.mark.parametrize("num_tokens", [1, 64, 1000])
def test_real_shapes_on_the_gpu(cuda, generator, impl, shape, num_tokens):
    num_rows, num_columns, num_groups = shape
    weight = _weight(num_rows, num_columns, generator, cuda, num_groups)
    x = torch.randn(num_tokens, num_groups * num_columns, generator=generator).bfloat16().to(cuda)
    rows = Fp8Rows(*quantise_fp8(x, 128))

    with guarded_allocations():
        y = fp8_linear(rows, weight, impl=impl)

    assert_fully_written(y)
    _check(y, rows, weight)
    assert relative_error(y, fp8_linear(rows, weight, out_dtype=torch.float32, impl="reference")) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 200])
def test_graphs_replay_with_other_rows(cuda, generator, num_tokens):
    weight = _weight(1536, 4096, generator, cuda)
    first, second = (torch.randn(num_tokens, 4096, generator=generator).bfloat16().to(cuda) for _ in range(2))

    assert_graph_replays(lambda x: fp8_linear(x, weight, impl="triton"), (first,), (second,))
