"""RMSNorm in Triton: interpreted against the reference, compiled for sm_90a, and on the GPU."""

import pytest
import torch

from dsv4_kernels.norm import rms_norm, rms_norm_fp8
from dsv4_kernels.quant import quantise_fp8
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
    same_bits,
)
from tests.kit.sm90a import recorded_launches

EPS = 1e-6


@pytest.mark.parametrize("shape", [(0, 512), (1, 512), (3, 2, 4096), (5, 1536), (4, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_triton_equals_the_formula_in_fp64(triton_device, generator, shape, dtype, weighted):
    x = torch.randn(shape, generator=generator).to(dtype).to(triton_device)
    weight = torch.randn(shape[-1], generator=generator).to(triton_device) if weighted else None

    with guarded_allocations():
        y = rms_norm(x, weight, EPS, impl="triton")

    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    expected = expected if weight is None else expected * weight.double()
    assert_fully_written(y)
    # fp32 sum and four fp32 roundings, then the cast
    assert_within(y, expected, expected.abs() * (unit_roundoff(dtype) + 16 * unit_roundoff(torch.float32)))


def test_a_non_contiguous_input_gives_the_same_bits(triton_device, generator):
    x = torch.randn(512, 3, generator=generator).to(triton_device).T

    assert torch.equal(rms_norm(x, None, EPS, impl="triton"), rms_norm(x.contiguous(), None, EPS, impl="triton"))


@pytest.mark.parametrize(("num_rows", "dim"), [(0, 1024), (1, 128), (3, 1024), (5, 1536)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_quantised_rows_are_those_of_two_launches(triton_device, generator, num_rows, dim, dtype, weighted):
    x = (torch.randn(num_rows, dim, generator=generator) * 3).to(dtype).to(triton_device)
    x[num_rows // 2 :, :128] = 0  # a group of zeros takes the smallest scale
    weight = torch.randn(dim, generator=generator).to(triton_device) if weighted else None

    with guarded_allocations():
        rows = rms_norm_fp8(x, weight, EPS, impl="triton")

    values, scales = quantise_fp8(rms_norm(x, weight, EPS, impl="triton"), 128, impl="reference")
    assert same_bits(rows.values, values)
    assert same_bits(rows.scales, scales)


def test_quantised_rows_may_be_columns_of_a_wider_product(triton_device, generator):
    product = torch.randn(4, 640, generator=generator).bfloat16().to(triton_device)
    product[:, 512:] = float("nan")

    rows = rms_norm_fp8(product[:, :512], None, EPS, impl="triton")

    apart = rms_norm_fp8(product[:, :512].contiguous(), None, EPS, impl="triton")
    assert same_bits(rows.values, apart.values)
    assert same_bits(rows.scales, apart.scales)


@pytest.mark.parametrize("dim", [1024, 1536])
def test_the_query_latent_compiles_to_one_launch_with_wide_accesses(dim):
    product = torch.empty(128, dim + 512, dtype=torch.bfloat16, device="meta")
    with recorded_launches() as launches:
        rms_norm_fp8(product[:, :dim], torch.empty(dim, device="meta"), EPS, impl="triton")

    (launch,) = launches
    kernel = launch.compile()
    kernel.assert_no_spills()
    kernel.assert_128bit_loads()
    assert "griddepcontrol.wait" in kernel.ptx
    assert kernel.count(r"STG\S*\.(64|128)\b"), "values are stored byte by byte"


@pytest.mark.parametrize("dim", [512, 4096, 7168])
def test_compiles_for_hopper_with_wide_loads_and_without_spills(dim):
    with recorded_launches() as launches:
        rms_norm(torch.empty(128, dim, dtype=torch.bfloat16, device="meta"),
                 torch.empty(dim, device="meta"), EPS, impl="triton")  # fmt: skip

    kernel = launches[0].compile()
    kernel.assert_no_spills()
    kernel.assert_128bit_loads()


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator):
    first, second = (torch.randn(33, 4096, generator=generator).bfloat16().to(cuda) for _ in range(2))
    weight = torch.randn(4096, generator=generator).to(cuda)

    def op(x, weight):
        return rms_norm(x, weight, EPS, impl="triton")

    assert_batch_invariant(op, (first, weight), batched=[0], rows=[[0], [32], range(7), [5, 5, 31]])
    assert_graph_replays(op, (first, weight), (second, weight))


@pytest.mark.gpu
def test_quantised_rows_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator):
    first, second = (torch.randn(33, 1024, generator=generator).bfloat16().to(cuda) for _ in range(2))
    weight = torch.randn(1024, generator=generator).to(cuda)

    def op(x, weight):
        rows = rms_norm_fp8(x, weight, EPS, impl="triton")
        return rows.values, rows.scales

    assert_batch_invariant(op, (first, weight), batched=[0], rows=[[0], [32], range(7), [5, 5, 31]])
    assert_graph_replays(op, (first, weight), (second, weight))
