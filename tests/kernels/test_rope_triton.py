"""Norm and rotation in Triton: interpreted against fp64, compiled for sm_90a, and on the GPU."""

import pytest
import torch

from dsv4_kernels.rope import apply_rope_, norm_rope, plain_frequencies, rotations
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
)
from tests.kit.sm90a import recorded_launches

EPS = 1e-6


def _inputs(shape, rope_dim, dtype, generator, device):
    x = torch.randn(shape, generator=generator).to(dtype)
    positions = torch.randint(0, 1 << 20, shape[:1], generator=generator)
    cis = rotations(positions, plain_frequencies(rope_dim, 10000.0))
    return x.to(device), cis.to(device)


def _turned(x, cis, inverse=False):
    """fp64. x: [T, ..., dim]."""
    table = (cis.conj() if inverse else cis).to(torch.complex128).view(cis.shape[0], *[1] * (x.dim() - 2), cis.shape[1])
    rope_dim = 2 * cis.shape[1]
    pairs = torch.view_as_complex(x[..., -rope_dim:].double().unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., :-rope_dim].double(), torch.view_as_real(pairs * table).flatten(-2)), -1)


@pytest.mark.parametrize(("shape", "rope_dim"), [((0, 4, 512), 64), ((1, 512), 64), ((3, 5, 512), 64), ((7, 96), 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_normed_rows_are_rotated(triton_device, generator, shape, rope_dim, dtype, weighted):
    x, cis = _inputs(shape, rope_dim, dtype, generator, triton_device)
    weight = torch.rand(shape[-1], generator=generator).to(triton_device) if weighted else None

    with guarded_allocations():
        y = norm_rope(x, weight, EPS, cis, impl="triton")

    assert_fully_written(y)
    wide = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    wide = wide if weight is None else wide * weight.double()
    half, ulp = unit_roundoff(dtype), unit_roundoff(torch.float32)
    # Both values of a pair are rounded before the rotation, the result once more; 16 ulp of fp32 for the norm.
    pair = wide.abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    assert_within(y, _turned(wide, cis), 2.1 * half * pair + 32 * ulp * pair)


@pytest.mark.parametrize("inverse", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_in_place_leaves_the_other_values_alone(triton_device, generator, inverse, dtype):
    x, cis = _inputs((5, 3, 192), 64, dtype, generator, triton_device)
    before = x.clone()

    y = apply_rope_(x, cis, inverse=inverse, impl="triton")

    assert y is x and torch.equal(x[..., :128], before[..., :128])
    pair = before[..., 128:].double().abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    bound = pair * (unit_roundoff(dtype) + 4 * unit_roundoff(torch.float32))
    assert_within(x[..., 128:], _turned(before, cis, inverse)[..., 128:], bound)


def test_other_memory_layouts_give_the_same_bits(triton_device, generator):
    x, cis = _inputs((4, 2, 128), 64, torch.bfloat16, generator, triton_device)
    strided = x.repeat_interleave(2, -1)[..., ::2]

    assert torch.equal(norm_rope(strided, None, EPS, cis, impl="triton"), norm_rope(x, None, EPS, cis, impl="triton"))


@pytest.mark.parametrize("shape", [(128, 64, 512), (128, 512)])
def test_compiles_for_hopper_with_wide_loads_and_without_spills(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with recorded_launches() as launches:
        norm_rope(x, torch.empty(512, device="meta"), EPS,
                  torch.empty(128, 32, dtype=torch.complex64, device="meta"), impl="triton")  # fmt: skip

    kernel = launches[0].compile()
    kernel.assert_no_spills()
    kernel.assert_128bit_loads()


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator):
    first, second = (_inputs((33, 64, 512), 64, torch.bfloat16, generator, cuda) for _ in range(2))

    def op(x, cis):
        return norm_rope(x, None, EPS, cis, impl="triton")

    assert_batch_invariant(op, first, batched=[0, 1], rows=[[0], [32], range(7), [5, 5, 31]])
    assert_graph_replays(op, first, second)
