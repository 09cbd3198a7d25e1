"""Decode attention in Triton: interpreted against fp64, compiled for sm_90a, and on the GPU."""

import pytest
import torch

from dsv4_kernels.attention.decode import decode_attention
from dsv4_kernels.kv.rows import PagedRows, RowFormat, page_bytes
from dsv4_kernels.testing import assert_within, nan_pool, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
)
from tests.kit.sm90a import recorded_launches

DIM, ROPE, SCALE = 512, 64, 512**-0.5
BF16 = torch.bfloat16


def _format(kind):
    return RowFormat(kind, DIM, ROPE, BF16)


def _source(kind, num_pages, rows_per_page, num_tokens, columns, generator, device):
    """A pool of NaN in which every other row is written, and slots of those rows; a fifth of the columns is none."""
    pool = nan_pool(_format(kind), num_pages, rows_per_page)
    written = torch.arange(0, num_pages * rows_per_page, 2)
    pool.write(written, torch.randn(len(written), DIM, generator=generator))
    slots = written[torch.randint(len(written), (num_tokens, columns), generator=generator)]
    none = torch.tensor([-1, -7, num_pages * rows_per_page, 1 << 40])
    none = none[torch.randint(len(none), slots.shape, generator=generator)]
    slots = torch.where(torch.rand(slots.shape, generator=generator) < 0.2, none, slots)
    return PagedRows(pool.format, pool.pages.to(device), rows_per_page), slots.to(device)


def _queries(num_tokens, num_heads, generator, device):
    q = torch.randn(num_tokens, num_heads, DIM, generator=generator).to(BF16)
    angle = 6.3 * torch.rand(num_tokens, ROPE // 2, generator=generator)
    return q.to(device), torch.polar(torch.ones_like(angle), angle).to(device)


def _check(out, q, pools, slots, counts, sink, cis):
    """Against fp64: bf16 probabilities of logits that are fp32 sums of 512 products, and one rounding at the end."""
    rows, is_row = [], []
    for pool, named, count in zip(pools, slots, counts, strict=True):
        inside = (named >= 0) & (named < pool.num_pages * pool.rows_per_page)
        if count is not None:
            inside &= torch.arange(named.shape[1], device=named.device) < count[:, None]
        rows.append(pool.gather(torch.where(inside, named, -1)).double())
        is_row.append(inside)
    kv, inside = torch.cat(rows, 1), torch.cat(is_row, 1)
    logits = torch.einsum("thd,tkd->thk", q.double(), kv) * SCALE
    weights = torch.where(inside[:, None], logits.exp(), 0.0)
    total = weights.sum(-1, keepdim=True) + (0.0 if sink is None else sink.double().exp()[:, None])
    weights = weights / torch.where(total == 0, 1.0, total)
    slip = torch.einsum("thd,tkd->thk", q.double().abs(), kv.abs()).amax(-1, keepdim=True) * SCALE * 2.0**-19
    expected, magnitude = weights @ kv, weights @ kv.abs()
    bound = magnitude * (unit_roundoff(BF16) + 2 * slip + 2.0**-18)
    if cis is not None:
        pairs = torch.view_as_complex(expected[..., -ROPE:].unflatten(-1, (-1, 2)).contiguous())
        expected[..., -ROPE:] = torch.view_as_real(pairs * cis.to(torch.complex128).conj()[:, None]).flatten(-2)
        bound[..., -ROPE:] = bound[..., -ROPE:].unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    assert_within(out, expected, bound + expected.abs() * unit_roundoff(BF16) * 1.01)


@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "columns", "num_splits", "has_sink"),
    [(0, 8, (32,), None, True), (1, 8, (33,), None, True), (2, 65, (64, 31), 1, False), (2, 16, (40, 70), 3, True),
     (1, 3, (1, 0), 2, False)],
)  # fmt: skip
def test_triton_follows_the_formula(
    triton_device, generator, kind, num_tokens, num_heads, columns, num_splits, has_sink
):
    q, cis = _queries(num_tokens, num_heads, generator, triton_device)
    sources = [
        _source(kind, 5, rows, num_tokens, width, generator, triton_device)
        for rows, width in zip((33, 2), columns, strict=False)
    ]
    pools, slots = [pool for pool, _ in sources], [rows for _, rows in sources]
    counts = [None, torch.full((num_tokens,), 32, device=triton_device)][: len(columns)]
    sink = torch.randn(num_heads, generator=generator).to(triton_device) if has_sink else None
    cis = cis if has_sink else None

    with guarded_allocations():
        out = decode_attention(
            q, pools, slots, counts, sink=sink, cis=cis, scale=SCALE, num_splits=num_splits, impl="triton"
        )

    assert_fully_written(out)
    _check(out, q, pools, slots, counts, sink, cis)


@pytest.mark.parametrize("has_sink", [True, False])
def test_a_token_without_keys_is_zero_whatever_the_sink(triton_device, generator, has_sink):
    q, cis = _queries(2, 8, generator, triton_device)
    pool, slots = _source("kv_fp8", 2, 8, 2, 40, generator, triton_device)
    slots[0] = -1
    counts = [torch.tensor([40, 0], device=triton_device)]
    sink = torch.full((8,), -1e4, device=triton_device) if has_sink else None

    with guarded_allocations():
        out = decode_attention(q, [pool], [slots], counts, sink=sink, cis=cis, scale=SCALE, num_splits=2, impl="triton")

    assert not out.any()


def test_arguments_that_do_not_fit_are_refused(generator):
    q, cis = _queries(2, 8, generator, "cpu")
    pool, slots = _source("kv_fp8", 2, 8, 2, 4, generator, "cpu")
    good = {"sink": None, "cis": cis, "scale": SCALE}
    with pytest.raises(ValueError, match="q is"):
        decode_attention(q.float(), [pool], [slots], [None], **good)
    with pytest.raises(ValueError, match="expected 1 or 2"):
        decode_attention(q, [pool] * 3, [slots] * 3, [None] * 3, **good)
    with pytest.raises(ValueError, match="do not fit 2 tokens"):
        decode_attention(q, [pool], [slots[:1]], [None], **good)
    with pytest.raises(ValueError, match="sink has shape"):
        decode_attention(q, [pool], [slots], [None], **{**good, "sink": torch.zeros(4)})
    with pytest.raises(ValueError, match="rotations have shape"):
        decode_attention(q, [pool], [slots], [None], **{**good, "cis": cis[:1]})
    with pytest.raises(ValueError, match="pool has format"):
        decode_attention(q, [nan_pool(RowFormat("plain", DIM), 1, 4)], [slots], [None], **good)


@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
def test_compiles_for_hopper_on_tensor_cores_with_wide_loads(kind):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def pool(num_pages, rows):
        return PagedRows(_format(kind), meta(num_pages, page_bytes(_format(kind), rows), dtype=torch.uint8), rows)

    slots = [meta(128, 128, dtype=torch.int64), meta(128, 512, dtype=torch.int64)]
    counts = [None, meta(128, dtype=torch.int64)]
    with recorded_launches() as launches:
        decode_attention(
            meta(128, 64, DIM, dtype=BF16), [pool(128, 136), pool(1000, 64)], slots, counts,
            sink=meta(64), cis=meta(128, ROPE // 2, dtype=torch.complex64), scale=SCALE, impl="triton",
        )  # fmt: skip

    split, combine = (launch.compile() for launch in launches)
    split.assert_tensor_core("HGMMA")
    split.assert_128bit_loads()
    combine.assert_no_spills()
    combine.assert_128bit_loads()
    if kind == "plain":
        split.assert_no_spills()
    else:  # widening E4M3 beside the sums: 448 bytes a thread go to local memory
        assert split.spill_bytes <= 448, split.spill_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kv_fp8", "plain"])
def test_graphs_replay_and_tokens_do_not_depend_on_the_batch_at_a_fixed_split(cuda, generator, kind):
    window, first_slots = _source(kind, 16, 136, 33, 128, generator, cuda)
    entries, more_slots = _source(kind, 200, 64, 33, 512, generator, cuda)
    sink = torch.randn(64, generator=generator).to(cuda)

    def op(q, cis, slots, more, count):
        return decode_attention(q, [window, entries], [slots, more], [None, count], sink=sink, cis=cis, scale=SCALE,
                                num_splits=5, impl="triton")  # fmt: skip

    def inputs(order):
        count = torch.randint(0, 513, (33,), generator=generator).to(cuda)
        return (*_queries(33, 64, generator, cuda), first_slots[order], more_slots[order], count)

    first, second = inputs(torch.arange(33)), inputs(torch.arange(33).flip(0))
    _check(op(*first), first[0], [window, entries], list(first[2:4]), [None, first[4]], sink, first[1])
    assert_batch_invariant(op, first, batched=range(5), rows=[[0], [32], range(7), [5, 5, 31]])
    assert_graph_replays(op, first, second)
