"""Decode attention in Triton: interpreted against fp64, compiled for sm_90a, and on the GPU."""

from dataclasses import replace

import pytest
import torch

from dsv4_kernels.attention.decode import PoolKeys, decode_attention, decode_attention_fp8
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


def _check(out, q, keys, sink, cis):
    assert_attention(out, q, [named_keys(one.pool, one.slots, one.counts) for one in keys], sink, cis)


@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "columns", "num_splits", "has_sink"),
    [(0, 8, (32,), None, True), (1, 8, (65,), None, True), (2, 65, (128, 31), 1, False), (2, 16, (70, 130), 3, True),
     (1, 3, (1, 0), 2, False), (1, 8, (20, 70), 1, True)],
)  # fmt: skip
def test_triton_follows_the_formula(
    triton_device, generator, kind, num_tokens, num_heads, columns, num_splits, has_sink
):
    q, cis = queries(num_tokens, num_heads, generator, triton_device)
    counts = (None, torch.full((num_tokens,), 66, device=triton_device))
    keys = [
        PoolKeys(*pool_and_slots(kind, 5, rows, num_tokens, width, generator, triton_device), count)
        for rows, width, count in zip((33, 2), columns, counts, strict=False)
    ]
    sink = torch.randn(num_heads, generator=generator).to(triton_device) if has_sink else None
    cis = cis if has_sink else None

    with guarded_allocations():
        out = decode_attention(q, keys, sink=sink, cis=cis, scale=SCALE, num_splits=num_splits, impl="triton")

    assert_fully_written(out)
    _check(out, q, keys, sink, cis)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_fp8_rows_for_wo_a_come_from_the_sums(triton_device, generator, impl, num_splits):
    q, cis = queries(2, 8, generator, triton_device)
    keys = [PoolKeys(*pool_and_slots("kv_fp8", 5, 33, 2, 70, generator, triton_device))]
    sink = torch.randn(8, generator=generator).to(triton_device)

    with guarded_allocations():
        out = decode_attention_fp8(q, keys, sink=sink, cis=cis, scale=SCALE, num_splits=num_splits, impl=impl)

    assert out.values.shape == (2, 8 * DIM) and out.scales.shape == (2, 8 * 4)
    _check(out, q, keys, sink, cis)


@pytest.mark.parametrize("has_sink", [True, False])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_token_without_keys_is_zero_whatever_the_sink(triton_device, generator, has_sink, num_splits):
    q, cis = queries(2, 8, generator, triton_device)
    pool, slots = pool_and_slots("kv_fp8", 2, 8, 2, 70, generator, triton_device)
    slots[0] = -1
    keys = [PoolKeys(pool, slots, torch.tensor([70, 0], device=triton_device))]
    sink = torch.full((8,), -1e4, device=triton_device) if has_sink else None

    with guarded_allocations():
        out = decode_attention(q, keys, sink=sink, cis=cis, scale=SCALE, num_splits=num_splits, impl="triton")

    assert not out.any()


def test_arguments_that_do_not_fit_are_refused(generator):
    q, cis = queries(2, 8, generator, "cpu")
    keys = PoolKeys(*pool_and_slots("kv_fp8", 2, 8, 2, 4, generator, "cpu"))
    good = {"sink": None, "cis": cis, "scale": SCALE}
    with pytest.raises(ValueError, match="q is"):
        decode_attention(q.float(), [keys], **good)
    with pytest.raises(ValueError, match="expected 1 or 2"):
        decode_attention(q, [keys] * 3, **good)
    with pytest.raises(ValueError, match="do not fit 2 tokens"):
        decode_attention(q, [replace(keys, slots=keys.slots[:1])], **good)
    with pytest.raises(ValueError, match="sink has shape"):
        decode_attention(q, [keys], **{**good, "sink": torch.zeros(4)})
    with pytest.raises(ValueError, match="rotations have shape"):
        decode_attention(q, [keys], **{**good, "cis": cis[:1]})
    with pytest.raises(ValueError, match="pool has format"):
        decode_attention(q, [replace(keys, pool=nan_pool(RowFormat("plain", DIM), 1, 4))], **good)
    with pytest.raises(ValueError, match="pools have formats"):
        decode_attention(q, [keys, replace(keys, pool=nan_pool(row_format("plain"), 1, 4))], **good)


@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
@pytest.mark.parametrize(
    ("op", "num_splits"), [(decode_attention, 1), (decode_attention, 5), (decode_attention_fp8, 1)]
)
def test_compiles_for_hopper_on_tensor_cores_with_wide_loads(kind, num_splits, op):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def pool(num_pages, rows):
        return PagedRows(row_format(kind), meta(num_pages, page_bytes(row_format(kind), rows), dtype=torch.uint8), rows)

    keys = [
        PoolKeys(pool(128, 136), meta(128, 128, dtype=torch.int64)),
        PoolKeys(pool(1000, 64), meta(128, 512, dtype=torch.int64), meta(128, dtype=torch.int64)),
    ]
    with recorded_launches() as launches:
        op(
            meta(128, 64, DIM, dtype=BF16), keys, sink=meta(64), cis=meta(128, ROPE // 2, dtype=torch.complex64),
            scale=SCALE, num_splits=num_splits, impl="triton",
        )  # fmt: skip

    attend, *combine = (launch.compile() for launch in launches)
    if kind == "kv_fp8" and num_splits > 1:  # of 1,617 instructions of the loop
        assert_attends_at_full_rate(attend, spill_bytes=48, spills_in_loop=9)
    else:
        assert_attends_at_full_rate(attend, spill_bytes=8)
    assert len(combine) == (num_splits > 1)
    for kernel in combine:
        kernel.assert_no_spills()
        kernel.assert_128bit_loads()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
def test_graphs_replay_and_tokens_do_not_depend_on_the_batch_at_a_fixed_split(cuda, generator, kind):
    window, first_slots = pool_and_slots(kind, 16, 136, 33, 128, generator, cuda)
    entries, more_slots = pool_and_slots(kind, 200, 64, 33, 512, generator, cuda)
    sink = torch.randn(64, generator=generator).to(cuda)

    def op(q, cis, slots, more, count):
        keys = [PoolKeys(window, slots), PoolKeys(entries, more, count)]
        return decode_attention(q, keys, sink=sink, cis=cis, scale=SCALE, num_splits=5, impl="triton")

    def inputs(order):
        count = torch.randint(0, 513, (33,), generator=generator).to(cuda)
        return (*queries(33, 64, generator, cuda), first_slots[order], more_slots[order], count)

    first, second = inputs(torch.arange(33)), inputs(torch.arange(33).flip(0))
    keys = [PoolKeys(window, first[2]), PoolKeys(entries, *first[3:5])]
    _check(op(*first), first[0], keys, sink, first[1])
    assert_batch_invariant(op, first, batched=range(5), rows=[[0], [32], range(7), [5, 5, 31]])
    assert_graph_replays(op, first, second)
