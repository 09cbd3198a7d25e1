"""The test kit itself: the interpreter computes narrow formats as the GPU does, guards and comparisons see faults."""

import pytest
import torch
import triton
import triton.language as tl

from dsv4_kernels.benchmark import find_cases
from dsv4_kernels.testing import assert_within, relative_error
from tests.kit.kernel_checks import assert_batch_invariant, assert_fully_written, guarded_allocations
from tests.kit.sm90a import recorded_launches
from tests.kit.triton_interpreter import interpreted


@triton.jit
def _double(x):
    return x + x


@triton.jit
def _cast_kernel(x_ptr, y_ptr, num, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < num, other=0.0)
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < num)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    out = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, _double(out))


@triton.jit
def _overrun_kernel(y_ptr, num):
    at = tl.arange(0, 16)
    tl.store(y_ptr + at, at.to(tl.float32), mask=at <= num)


@triton.jit
def _row_sum_kernel(x_ptr, y_ptr, num_rows, block: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * block + tl.arange(0, block))
    tl.store(y_ptr + tl.program_id(0), tl.sum(x.to(tl.float32), 0) + num_rows)


@triton.jit
def _copy_columns_kernel(x_ptr, y_ptr, step: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 33 + step * tl.arange(0, 32)[None, :]
    tl.store(y_ptr + tl.arange(0, 64)[:, None] * 32 + tl.arange(0, 32)[None, :], tl.load(x_ptr + at))


def _cast(x, dtype):
    y = torch.empty_like(x, dtype=dtype)
    _cast_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_interpreted_casts_round_as_torch_does(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 14, generator=generator) * torch.logspace(-6, 3, 1 << 14)
    expected = x.to(dtype) if dtype == torch.bfloat16 else x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)

    with interpreted():
        y = _cast(x, dtype)

    assert torch.equal(y.float(), expected.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_every_bit_pattern_of_a_narrow_format_is_read_exactly(dtype):
    patterns = torch.arange(256, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(1 << 16).to(torch.int16)
    x = patterns.view(dtype)

    with interpreted():
        y = _cast(x, torch.float32)

    assert torch.equal(y.nan_to_num(nan=1e30), x.float().nan_to_num(nan=1e30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_interpreted_dot_and_device_functions_are_right(dtype):
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)

    with interpreted():
        _dot_kernel[(1,)](a, b, out, n=32)

    torch.testing.assert_close(out, 2 * (a.float() @ b.float()))


def test_the_interpreter_leaves_no_trace_behind():
    before = dict(vars(tl)), dict(vars(tl.core)), dict(vars(_cast_kernel.fn.__globals__["torch"])).keys()
    with interpreted():
        _cast(torch.ones(3), torch.bfloat16)

    after = dict(vars(tl)), dict(vars(tl.core)), dict(vars(_cast_kernel.fn.__globals__["torch"])).keys()
    assert before == after
    with pytest.raises(RuntimeError):
        _double(1)


def test_a_write_behind_an_output_is_seen():
    with interpreted(), pytest.raises(AssertionError, match="write behind an allocation of 32 bytes"):  # noqa: SIM117
        with guarded_allocations():
            _overrun_kernel[(1,)](torch.empty(8), 8)


def test_elements_that_were_never_written_are_seen():
    with guarded_allocations():
        out, ids = torch.empty(4), torch.empty(4, dtype=torch.int32)
    out[:3] = 0.0
    ids[:] = 0

    with pytest.raises(AssertionError, match="output 0: 1 of 4"):
        assert_fully_written(out, ids)


def test_a_row_that_depends_on_the_batch_is_seen():
    def op(x):
        y = torch.empty(x.shape[0])
        _row_sum_kernel[(x.shape[0],)](x, y, x.shape[0], block=16)
        return y

    with interpreted(), pytest.raises(AssertionError, match=r"rows \[1\] differs"):
        assert_batch_invariant(op, (torch.ones(3, 16),), batched=[0], rows=[[1]])


def test_a_recorded_launch_compiles_for_hopper_and_runs_nothing():
    a = torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="meta")
    with recorded_launches() as launches:
        _dot_kernel[(1,)](a, a, torch.empty(64, 64, device="meta"), n=64, num_warps=4)

    kernel = launches[0].compile()
    kernel.assert_no_spills()
    kernel.assert_128bit_loads()
    kernel.assert_tensor_core("QGMMA")
    assert ".target sm_90a" in kernel.ptx and 0 < kernel.registers <= 255
    with pytest.raises(AssertionError, match="no HGMMA"):
        kernel.assert_tensor_core("HGMMA")


def test_accesses_across_rows_are_seen():
    x = torch.empty(64, 64, dtype=torch.int32, device="meta")
    with recorded_launches() as launches:
        for step in (1, 2):
            _copy_columns_kernel[(1,)](x, x, step=step)

    launches[0].compile().assert_lanes_run_along_rows()
    with pytest.raises(AssertionError, match="over rows in accesses of 32 columns"):
        launches[1].compile().assert_lanes_run_along_rows()


def test_comparisons_see_nan_and_name_the_place():
    expected = torch.zeros(2, 2, dtype=torch.float64)
    actual = torch.zeros(2, 2)
    assert_within(actual, expected, 0.0)
    actual[1, 0] = float("nan")

    with pytest.raises(AssertionError, match=r"1 of 4 .* first at \(1, 0\)"):
        assert_within(actual, expected, 1e9)
    assert relative_error(actual, expected) != 0.0


def test_every_benchmark_case_is_found_and_says_what_binds_it():
    cases = find_cases()

    assert {case.name.split()[0] for case in cases} >= {"norm"}
    for case in cases:
        assert case.bytes_moved > 0 and case.run is not None
        ordered = (case.stretch_fraction, case.target_fraction)
        assert ordered[0] < ordered[1] if case.roof == "microseconds" else 1 >= ordered[0] >= ordered[1] > 0
    assert find_cases(["no such op"]) == []
