"""RMSNorm in Triton: interpreted against the reference, compiled for sm_90a, and on the GPU."""

import pytest
import torch

from dsv4_kernels.norm import rms_norm
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
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
