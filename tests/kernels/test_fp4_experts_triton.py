"""MXFP4 experts in Triton against the formula: interpreted, compiled for sm_90a, and on the GPU."""

import re

import pytest
import torch

from dsv4_kernels.moe import build_work_list
from dsv4_kernels.moe.fp4 import fp4_experts, rows_per_tile, unpack_fp4
from dsv4_kernels.moe.fp4.inputs import random_experts, random_routing
from dsv4_kernels.moe.fp4.layout import PackedFp4
from dsv4_kernels.moe.fp4.triton_impl import Config, TiledRows, config_for, down, gate_up, gather
from dsv4_kernels.moe.fp4.triton_impl import fp4_experts as run_triton
from dsv4_kernels.quant import Fp8Rows, dequantise_fp8, quantise_fp8
from dsv4_kernels.testing import relative_error
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
    same_bits,
)
from tests.kit.sm90a import recorded_launches

D, I, E, TOPK = 256, 128, 5, 3
# Rows are rounded to bf16 (relative error up to 2^-9) and then their sum; a hidden value that is nearly half way
# between two e4m3 values may go to either (2^-4 of that value): of 1,000 values about one on the CPU and five on the
# GPU, whose FP8 products keep 13 fraction bits. Together below 2^-8 + sqrt(0.005) * 2^-4 = 0.008 in the norm.
MAX_RELATIVE_ERROR = 0.008


def _inputs(generator, device, num_tokens, **kinds):
    experts = random_experts(E, D, I, generator, **kinds)
    ids, weights = random_routing(num_tokens, TOPK, E, generator)
    x = torch.randn(num_tokens, D, generator=generator).bfloat16()
    return x.to(device), ids.to(device), weights.to(device), _to(experts, device)


def _to(experts, device):
    def move(p):
        return PackedFp4(p.words.to(device), p.exponents.to(device), p.block_exponent.to(device), p.is_folded)

    return type(experts)(move(experts.w13), move(experts.w2), experts.limit)


@pytest.mark.parametrize(
    ("num_tokens", "kinds"),
    [(0, {}), (1, {}), (9, {}), (9, {"octaves": 12}), (4, {"is_folded": False, "octaves": 30}), (3, {"limit": 0.05})],
)
def test_triton_equals_the_formula(triton_device, generator, num_tokens, kinds):
    x, ids, weights, experts = _inputs(generator, triton_device, num_tokens, **kinds)

    with guarded_allocations():
        y = fp4_experts(x, ids, weights, experts, impl="triton")

    assert y.dtype == torch.bfloat16
    assert_fully_written(y)
    expected = fp4_experts(x, ids, weights, experts, out_dtype=torch.float32, impl="reference")
    assert relative_error(y, expected) < MAX_RELATIVE_ERROR


def test_the_gate_up_product_is_exact_to_a_rounding_of_the_hidden_values(triton_device, generator):
    x, ids, weights, experts = _inputs(generator, triton_device, 7)
    work = build_work_list(ids, num_experts=E, rows_per_tile=16)
    tiled = gate_up(gather(x, None, work), weights, experts.w13, experts.limit, work, config_for(work))

    hidden = tiled.values[: len(work.pairs)]
    hidden_scales = _scales_of(tiled, work)
    values, scales = quantise_fp8(x, 128)
    rows = dequantise_fp8(values, scales).double()[work.pairs.long() // TOPK]
    owners = ids.flatten()[work.pairs.long()]
    w13 = unpack_fp4(experts.w13).double()[owners.long()]
    gate, up = torch.einsum("pnk,pk->pn", w13, rows).unflatten(-1, (-1, 2, 128)).unbind(2)
    silu = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    expected = (silu.flatten(1) * weights.flatten()[work.pairs.long()].unsqueeze(-1)).float()
    expected_values, expected_scales = quantise_fp8(expected, 128)
    assert torch.equal(hidden_scales, expected_scales)
    steps = hidden.view(torch.uint8).int() - expected_values.view(torch.uint8).int()  # neighbouring codes differ by 1
    assert steps.abs().max() <= 1 and (steps != 0).float().mean() < 0.01


def test_the_down_product_is_bitwise_right_where_every_sum_is_exact(triton_device, generator):
    """One hidden value in 32 is not zero: products and sums of few bits, exact in the tensor core and in bf16."""
    _, ids, _, experts = _inputs(generator, triton_device, 6, octaves=1)
    work = build_work_list(ids, num_experts=E, rows_per_tile=16)
    hidden = torch.zeros(18, I)
    hidden[torch.arange(18), torch.randint(0, I, (18,), generator=generator)] = 1.0
    tiled = TiledRows(
        torch.cat((hidden, torch.full((15, I), float("nan")))).to(torch.float8_e4m3fn).to(triton_device),
        torch.full((len(work.tile_rows), I // 128, 16), 127 << 23, dtype=torch.int32, device=triton_device),
    )

    rows = down(tiled, experts.w2, work, config_for(work))

    w2 = unpack_fp4(experts.w2)
    for position, pair in enumerate(work.pairs.tolist()):
        expected = w2[int(ids.flatten()[pair])] @ hidden[position].to(triton_device)
        assert torch.equal(rows[pair].float(), expected)


def _scales_of(tiled, work):
    """[P, K/128] uint8 from the tiles of a work list."""
    codes = (tiled.scale_tiles >> 23).transpose(1, 2)  # [tiles, rows, K/128]
    is_row = torch.arange(16, device=codes.device) < work.tile_rows.unsqueeze(1)
    return codes[is_row].to(torch.uint8)


def test_pairs_routed_nowhere_and_shared_rows_and_other_ranks(triton_device, generator):
    x, ids, weights, experts = _inputs(generator, triton_device, 6)
    ids[2] = -1  # a padded row
    ids[4, 1] = -1
    shared = torch.randn(6, D, generator=generator).to(triton_device)
    values, scales = quantise_fp8(x, 128)
    values[2], scales[2] = float("nan"), 255  # must not be read

    y = fp4_experts(Fp8Rows(values, scales), ids + 40, weights, experts, first_expert=40, shared=shared, impl="triton")
    ids[ids == -1] = 900
    other = fp4_experts(Fp8Rows(values, scales), ids, weights, experts, first_expert=0, shared=shared, impl="triton")

    values[2], scales[2] = 0.0, 127
    ids[ids == 900] = -1
    expected = fp4_experts(Fp8Rows(values, scales), ids, weights, experts, shared=shared, impl="reference")
    assert torch.equal(y[2], shared[2].bfloat16())
    assert relative_error(y, expected) < MAX_RELATIVE_ERROR
    assert same_bits(y, other)


def test_a_row_has_the_same_bits_in_any_batch_and_tile(triton_device, generator):
    x, ids, weights, experts = _inputs(generator, triton_device, 40)

    def op(x, ids, weights):
        return fp4_experts(x, ids, weights, experts, impl="triton")

    assert_batch_invariant(op, (x, ids, weights), batched=[0, 1, 2], rows=[[0], [39, 3, 3]])
    work = build_work_list(ids, num_experts=E, rows_per_tile=64)
    assert same_bits(op(x, ids, weights), fp4_experts(x, ids, weights, experts, work=work, impl="triton"))


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kinds", [{}, {"is_folded": False}])
def test_every_launch_option_gives_the_same_bits(triton_device, generator, kinds, is_split):
    x, ids, weights, experts = _inputs(generator, triton_device, 3, **kinds)
    work = build_work_list(ids, num_experts=E, rows_per_tile=16)
    y = fp4_experts(x, ids, weights, experts, impl="triton")

    options = Config(8, 3, 8, 4, down_halves=2, gate_up_is_split=is_split)
    other = run_triton(x, None, ids, weights, experts, 0, None, work, torch.bfloat16, options)

    assert same_bits(y, other)


def test_shapes_that_disagree_are_refused(generator):
    x, ids, weights, experts = _inputs(generator, "cpu", 2)

    with pytest.raises(ValueError, match="hidden size 256"):
        fp4_experts(x[:, :128], ids, weights, experts)
    with pytest.raises(ValueError, match="ids"):
        fp4_experts(x, ids[:1], weights[:1], experts)


@pytest.mark.parametrize("num_tokens", [32, 512, 8192])
def test_compiles_for_hopper_within_its_instruction_budget(num_tokens):
    """HBM feeds an SM 18.5 packed bytes a clock, and it issues 128 thread instructions: six a byte keep up at 85 %."""
    launches = _launches(num_tokens, is_folded=True)
    for launch, rows in zip(launches[1:3], (256, 128), strict=True):
        kernel = launch.compile()
        kernel.assert_no_spills()
        kernel.assert_tensor_core("QGMMA")
        kernel.assert_128bit_loads()
        loop = kernel.hot_loop()
        assert not any(re.search(r"\bSTS|LDSM", text) for text in loop), "operands go through shared memory"
        packed_bytes_per_thread = rows * 64 / (32 * launch.options["num_warps"])
        if num_tokens <= 32:
            assert len(loop) / packed_bytes_per_thread < 6
    assert all("griddepcontrol.wait" in launch.compile().ptx for launch in launches)
    for launch in (launches[0], launches[3]):
        launch.compile().assert_128bit_loads()
        launch.compile().assert_no_spills()


def test_the_exact_fallback_compiles_for_hopper():
    for launch in _launches(32, is_folded=False)[1:3]:
        launch.compile().assert_no_spills()
        launch.compile().assert_tensor_core("QGMMA")


def _launches(num_tokens, *, is_folded):
    """Of the Flash shape, on meta tensors."""
    hidden, intermediate, topk, num_experts = 4096, 2048, 6, 256

    def meta(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(num_rows, num_columns, rows):
        grid = (num_experts, num_rows // rows, num_columns // 128)
        return PackedFp4(meta(*grid, rows, 16), meta(*grid, rows), meta(*grid), is_folded)

    small = random_experts(1, 128, 128, torch.Generator())
    experts = type(small)(matrix(2 * intermediate, hidden, 256), matrix(hidden, intermediate, 128), 10.0)
    ids, weights = meta(num_tokens, topk), meta(num_tokens, topk, dtype=torch.float32)
    tile = rows_per_tile(num_tokens, topk, num_experts)
    work = build_work_list(ids, num_experts=num_experts, rows_per_tile=tile, impl="reference")
    x = meta(num_tokens, hidden, dtype=torch.bfloat16)
    if num_tokens > 512:  # both forms of the rows
        x = Fp8Rows(x.to(torch.float8_e4m3fn), meta(num_tokens, hidden // 128, dtype=torch.uint8))
    with recorded_launches() as launches:
        fp4_experts(x, ids, weights, experts, work=work, impl="triton")
    return launches


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 33, 300, 2000])
def test_real_shapes_on_the_gpu(cuda, num_tokens):
    generator = torch.Generator(device=cuda).manual_seed(num_tokens)
    experts = random_experts(16, 4096, 2048, generator)
    ids, weights = random_routing(num_tokens, 6, 16, generator)
    x = torch.randn(num_tokens, 4096, generator=generator, device=cuda).bfloat16()

    with guarded_allocations():
        y = fp4_experts(x, ids, weights, experts, impl="triton")

    assert_fully_written(y)
    expected = fp4_experts(x, ids, weights, experts, out_dtype=torch.float32, impl="reference")
    assert relative_error(y, expected) < MAX_RELATIVE_ERROR
    rows = [[0], list(range(0, num_tokens, 7))]
    assert_batch_invariant(
        lambda *part: fp4_experts(*part, experts, impl="triton"), (x, ids, weights), batched=[0, 1, 2], rows=rows
    )


@pytest.mark.gpu
def test_graphs_replay_with_another_routing(cuda):
    generator = torch.Generator(device=cuda).manual_seed(0)
    experts = random_experts(32, 512, 256, generator)

    def inputs():
        ids, weights = random_routing(24, 6, 32, generator)
        ids[-4:] = -1
        return torch.randn(24, 512, generator=generator, device=cuda).bfloat16(), ids, weights

    assert_graph_replays(lambda *args: fp4_experts(*args, experts, impl="triton"), inputs(), inputs())
