"""Prefill attention in Triton: interpreted against fp64, compiled for sm_90a, and on the GPU."""

from dataclasses import replace

import pytest
import torch

from dsv4_kernels.attention.decode import decode_attention
from dsv4_kernels.attention.keys import Ending
from dsv4_kernels.attention.prefill import PoolKeys, WindowKeys, prefill_attention, prefill_attention_fp8, triton_impl
from dsv4_kernels.attention.triton_core import Step
from dsv4_kernels.kv.rows import PagedRows, RowFormat, page_bytes
from dsv4_kernels.testing import nan_pool
from tests.kit.attention_oracle import (
    BF16,
    DIM,
    ROPE,
    SCALE,
    assert_attends_at_full_rate,
    assert_attention,
    named_keys,
    pool_and_slots,
    queries,
    row_format,
)
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
)
from tests.kit.sm90a import recorded_launches

WINDOW = 70  # more than one block of keys


def _window(num_tokens, generator, device):
    """A chunk's rows behind WINDOW - 1 earlier ones, and NaN where no token of the chunk looks."""
    rows = torch.randn(WINDOW - 1 + num_tokens + 3, DIM, generator=generator).to(BF16)
    rows[-3:] = float("nan")
    end = torch.arange(num_tokens) + WINDOW
    return WindowKeys(rows.to(device), (end - WINDOW).to(device), end.to(device))


def _entries(kind, num_tokens, columns, generator, device):
    pool, slots = pool_and_slots(kind, 9, 8, num_tokens, columns, generator, device)
    counts = torch.randint(0, columns + 3, (num_tokens,), generator=generator)
    return PoolKeys(pool, slots, counts.to(device))


def _check(out, q, window, entries, sink, cis):
    row = torch.arange(window.rows.shape[0], device=q.device)
    inside = (row >= window.begin[:, None]) & (row < window.end[:, None])
    keys = [(window.rows.double().nan_to_num().expand(q.shape[0], -1, -1), inside)]
    if entries is not None:
        slots = entries.slots.expand(q.shape[0], -1)
        keys.append(named_keys(entries.pool, slots, entries.counts))
    assert_attention(out, q, keys, sink, cis)


@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "columns", "has_sink"), [(0, 8, 5, True), (3, 8, 65, True), (2, 65, 1, False)]
)
def test_triton_follows_the_formula(triton_device, generator, kind, num_tokens, num_heads, columns, has_sink):
    q, cis = queries(num_tokens, num_heads, generator, triton_device)
    window = _window(num_tokens, generator, triton_device)
    entries = _entries(kind, num_tokens, columns, generator, triton_device)
    sink = torch.randn(num_heads, generator=generator).to(triton_device) if has_sink else None
    cis = cis if has_sink else None

    with guarded_allocations():
        out = prefill_attention(q, window, entries, sink=sink, cis=cis, scale=SCALE, impl="triton")

    assert_fully_written(out)
    _check(out, q, window, entries, sink, cis)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_one_list_of_entries_serves_all_tokens(triton_device, generator, impl):
    q, cis = queries(3, 8, generator, triton_device)
    window, entries = _window(3, generator, triton_device), _entries("kv_fp8", 3, 66, generator, triton_device)
    if impl == "reference":
        window = replace(window, rows=window.rows.nan_to_num())
    common = PoolKeys(entries.pool, entries.slots[:1], torch.tensor([0, 65, 66], device=triton_device))

    out = prefill_attention(q, window, common, sink=None, cis=cis, scale=SCALE, impl=impl)

    _check(out, q, window, common, None, cis)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_fp8_rows_for_wo_a_come_from_the_sums(triton_device, generator, impl):
    q, cis = queries(2, 8, generator, triton_device)
    window, entries = _window(2, generator, triton_device), _entries("kv_fp8", 2, 30, generator, triton_device)
    window = replace(window, rows=window.rows.nan_to_num())
    sink = torch.randn(8, generator=generator).to(triton_device)

    with guarded_allocations():
        out = prefill_attention_fp8(q, window, entries, sink=sink, cis=cis, scale=SCALE, impl=impl)

    assert out.values.shape == (2, 8 * DIM) and out.scales.shape == (2, 8 * 4)
    _check(out, q, window, entries, sink, cis)


def test_ranges_are_cut_to_the_rows_and_a_token_without_keys_is_zero(triton_device, generator):
    q, cis = queries(3, 8, generator, triton_device)
    rows = torch.randn(5, DIM, generator=generator).to(BF16).to(triton_device)
    bounds = torch.tensor([[-9, 2, 5], [3, 99, 5]], device=triton_device)
    sink = torch.full((8,), -1e4, device=triton_device)

    out = prefill_attention(q, WindowKeys(rows, *bounds), None, sink=sink, cis=cis, scale=SCALE, impl="triton")

    _check(out, q, WindowKeys(rows, *bounds), None, sink, cis)
    assert not out[2].any()


def test_a_chunk_is_its_tokens_decoded_one_by_one(triton_device, generator):
    q, cis = queries(2, 8, generator, triton_device)
    window, entries = _window(2, generator, triton_device), _entries("plain", 2, 40, generator, triton_device)
    ring = PagedRows.allocate(row_format("plain"), 1, len(window.rows), triton_device)
    ring.write(torch.arange(len(window.rows), device=triton_device), window.rows)
    slots = window.begin[:, None] + torch.arange(WINDOW, device=triton_device)

    chunk = prefill_attention(q, window, entries, sink=None, cis=cis, scale=SCALE, impl="triton")
    steps = decode_attention(
        q, [entries, PoolKeys(ring, slots)], sink=None, cis=cis, scale=SCALE, num_splits=1, impl="triton"
    )

    assert torch.equal(chunk, steps)


def test_arguments_that_do_not_fit_are_refused(generator):
    q, cis = queries(2, 8, generator, "cpu")
    window, entries = _window(2, generator, "cpu"), _entries("kv_fp8", 2, 4, generator, "cpu")
    good = {"sink": None, "cis": cis, "scale": SCALE}
    with pytest.raises(ValueError, match="q is"):
        prefill_attention(q.float(), window, None, **good)
    with pytest.raises(ValueError, match="window rows are"):
        prefill_attention(q, replace(window, rows=window.rows.float()), None, **good)
    with pytest.raises(ValueError, match="do not fit 2 tokens"):
        prefill_attention(q, replace(window, end=window.end[:1]), None, **good)
    with pytest.raises(ValueError, match="do not fit 2 tokens"):
        prefill_attention(q, window, replace(entries, counts=entries.counts[:1]), **good)
    with pytest.raises(ValueError, match="pool has format"):
        prefill_attention(q, window, replace(entries, pool=nan_pool(RowFormat("plain", DIM), 1, 4)), **good)


@pytest.mark.parametrize("kind", ["kv_fp8", "plain", None])
@pytest.mark.parametrize("op", [prefill_attention, prefill_attention_fp8])
def test_compiles_for_hopper_on_tensor_cores_with_wide_loads(kind, op):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    bounds = meta(8192, dtype=torch.int64)
    entries = None
    if kind is not None:
        pages = meta(1000, page_bytes(row_format(kind), 64), dtype=torch.uint8)
        entries = PoolKeys(PagedRows(row_format(kind), pages, 64), meta(8192, 512, dtype=torch.int64), bounds)
    with recorded_launches() as launches:
        op(
            meta(8192, 64, DIM, dtype=BF16), WindowKeys(meta(8319, DIM, dtype=BF16), bounds, bounds), entries,
            sink=meta(64), cis=meta(8192, ROPE // 2, dtype=torch.complex64), scale=SCALE, impl="triton",
        )  # fmt: skip

    assert len(launches) == 1
    assert_attends_at_full_rate(launches[0].compile(), spill_bytes=8)


@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
def test_half_the_keys_a_step_leave_room_for_copies_two_steps_ahead(triton_device, generator, kind):
    q, cis = queries(2, 8, generator, triton_device)
    window, entries = _window(2, generator, triton_device), _entries(kind, 2, 100, generator, triton_device)

    out = triton_impl.prefill_attention(q, window, entries, Ending(None, cis, SCALE), Step(32, 5))

    _check(out, q, window, entries, None, cis)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
def test_graphs_replay_and_tokens_do_not_depend_on_the_batch(cuda, generator, kind):
    window = _window(150, generator, cuda)
    pool, slots = pool_and_slots(kind, 200, 64, 150, 512, generator, cuda)
    sink = torch.randn(64, generator=generator).to(cuda)

    def op(q, cis, begin, end, slots, count):
        return prefill_attention(q, WindowKeys(window.rows, begin, end), PoolKeys(pool, slots, count), sink=sink,
                                 cis=cis, scale=SCALE, impl="triton")  # fmt: skip

    def inputs(order):
        count = torch.randint(0, 513, (150,), generator=generator).to(cuda)
        return (*queries(150, 64, generator, cuda), window.begin[order], window.end[order], slots[order], count)

    first, second = inputs(torch.arange(150)), inputs(torch.arange(150).flip(0))
    few = [x[:20] for x in first]
    _check(op(*few), few[0], WindowKeys(window.rows, *few[2:4]), PoolKeys(pool, *few[4:6]), sink, few[1])
    assert_batch_invariant(op, first, batched=range(6), rows=[[0], [149], range(140), [5, 5, 31]])
    assert_graph_replays(op, first, second)
