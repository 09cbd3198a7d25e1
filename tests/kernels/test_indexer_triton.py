"""Indexer on pages: slots of the best entries; Triton interpreted, compiled for sm_90a, on the GPU; Gluon without."""

import pytest
import torch

from dsv4_kernels.indexer import gluon_impl, index_slots, triton_impl
from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.quant import fake_quant_index
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
    same_bits,
)
from tests.kit.sm90a import recorded_launches

BF16 = torch.bfloat16
DIM = 64


def _batch(kind, visible, columns, generator, *, heads=16, dim=DIM, rows=64, small=True, device="cpu"):
    """One sequence per token on shuffled pages; entries that none sees are NaN. Small integers make sums exact."""
    num = len(visible)
    pool = PagedRows.allocate(RowFormat(kind, dim, 0, BF16), num * columns + 1, rows, "cpu")
    pool.pages.fill_(0xFF)
    table = (torch.randperm(num * columns, generator=generator) + 1).view(num, columns)

    def draw(*shape):
        if small:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    for seq, count in enumerate(visible):
        slots = (table[seq].unsqueeze(1) * rows + torch.arange(rows)).flatten()[:count]
        pool.write(slots, draw(count, dim))
    q = draw(num, heads, dim).to(BF16)
    q = q if small else fake_quant_index(q, kind.removeprefix("index_"))
    weights = draw(num, heads) * 2.0**-6
    pool = PagedRows(pool.format, pool.pages.to(device), rows)
    counts = torch.tensor(visible, dtype=torch.int64)
    return (
        tuple(x.to(device) for x in (q, weights)),
        pool,
        tuple(x.to(device) for x in (table, torch.arange(num), counts)),
    )


@pytest.mark.parametrize("kind", ["index_fp8", "index_fp4"])
@pytest.mark.parametrize(
    ("visible", "columns", "rows", "topk"),
    [
        ([], 2, 64, 8),
        ([0, 1, 15, 16, 17], 1, 64, 16),
        ([63, 64, 65, 127, 128, 129], 4, 64, 24),
        ([2047, 2048, 2049, 2200], 35, 64, 512),
        ([4095, 4097], 65, 64, 100),
        ([40, 77], 6, 13, 20),
    ],
)
def test_slots_are_those_of_the_reference_with_many_ties(triton_device, generator, kind, visible, columns, rows, topk):
    head, pool, tail = _batch(kind, visible, columns, generator, rows=rows, device=triton_device)

    with guarded_allocations():
        slots, lengths = index_slots(*head, pool, *tail, topk, impl="triton")

    expected = index_slots(*head, pool, *tail, topk, impl="reference")
    assert_fully_written(slots, lengths)
    assert same_bits(lengths, expected[1]) and same_bits(slots, expected[0])


def test_the_size_of_a_program_changes_nothing(triton_device, generator):
    head, pool, tail = _batch("index_fp8", [1300, 900], 21, generator, device=triton_device)

    few = triton_impl.index_slots(*head, pool, *tail, 40, tiles=4)

    assert all(map(same_bits, few, triton_impl.index_slots(*head, pool, *tail, 40)))


def test_equal_scores_select_a_prefix(triton_device, generator):
    (q, weights), pool, tail = _batch("index_fp8", [5000, 300], 80, generator, device=triton_device)

    slots, lengths = index_slots(q, weights * 0, pool, *tail, 130, impl="triton")

    assert lengths.tolist() == [130, 130]
    first = (tail[0].unsqueeze(2) * 64 + torch.arange(64, device=triton_device)).flatten(1)[:, :130]
    assert torch.equal(slots, first)


def _assert_nothing_better_is_left_out(impl, kind, heads, generator, device):
    (q, weights), pool, tail = _batch(kind, [700, 900], 15, generator, heads=heads, dim=128, small=False, device=device)

    slots, _ = index_slots(q, weights, pool, *tail, 64, impl=impl)

    for token, count in enumerate([700, 900]):
        entries = (tail[0][token].unsqueeze(1) * 64 + torch.arange(64, device=q.device)).flatten()[:count]
        products = (q[token].double() @ pool.gather(entries).double().T).relu()
        scores = weights[token].double() @ products
        # Products of FP8 are summed with 13 bits below the largest addend, 32 at a time; fp32 behind them.
        magnitude = q[token].double().abs() @ pool.gather(entries).double().abs().T
        bound = float((weights[token].double().abs() @ magnitude).max()) * 2.0**-13
        is_chosen = torch.isin(entries, slots[token])
        assert int(is_chosen.sum()) == 64
        assert scores[~is_chosen].max() <= scores[is_chosen].min() + 2 * bound


@pytest.mark.parametrize("kind", ["index_fp8", "index_fp4"])
@pytest.mark.parametrize("heads", [64, 24])
def test_nothing_better_is_left_out(triton_device, generator, kind, heads):
    _assert_nothing_better_is_left_out("triton", kind, heads, generator, triton_device)


def test_several_tokens_share_a_sequence_and_padding_selects_nothing(triton_device, generator):
    (q, weights), pool, (table, _, _) = _batch("index_fp8", [200] * 4, 4, generator, device=triton_device)
    seqs = torch.tensor([2, 2, -1, 0], device=triton_device)
    visible = torch.tensor([150, 151, 0, 9], device=triton_device)

    slots, lengths = index_slots(q, weights, pool, table, seqs, visible, 32, impl="triton")

    expected = index_slots(q, weights, pool, table, seqs, visible, 32, impl="reference")
    assert lengths.tolist() == [32, 32, 0, 9]
    assert same_bits(slots, expected[0])


def test_shapes_that_do_not_fit_are_refused(generator):
    (q, weights), pool, tail = _batch("index_fp8", [3], 1, generator)

    with pytest.raises(ValueError, match="do not fit q"):
        index_slots(q, weights[:, :3], pool, *tail, 4)
    with pytest.raises(ValueError, match="top 5000"):
        index_slots(q, weights, pool, *tail, 5000)


def _recorded(impl, kind, monkeypatch):
    """Compiled kernels of a call on pages of the real model."""

    def meta(*shape, dtype=torch.int64):
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr(gluon_impl, "_multiprocessors", lambda device: 132)
    pool = PagedRows.allocate(RowFormat(kind, 128, 0, BF16), 8192, 64, "meta")
    with recorded_launches() as launches:
        index_slots(meta(8, 64, 128, dtype=BF16), meta(8, 64, dtype=torch.float32), pool, meta(8, 4096), meta(8),
                    meta(8), 512, impl=impl)  # fmt: skip
    return [launch.compile() for launch in launches]


@pytest.mark.parametrize(("kind", "instruction", "key_bits"), [("index_fp8", "QGMMA", 128), ("index_fp4", "HGMMA", 64)])
def test_compiles_for_hopper_without_spills(monkeypatch, kind, instruction, key_bits):
    scan, select = _recorded("triton", kind, monkeypatch)

    scan.assert_tensor_core(instruction)
    scan.assert_128bit_loads()
    assert scan.count(rf"\bLDGSTS\S*\.{key_bits}\b") >= 4  # keys travel to shared memory asynchronously
    select.assert_128bit_loads()
    for kernel in (scan, select):
        kernel.assert_no_spills()


@pytest.mark.parametrize("kind", ["index_fp8", "index_fp4"])
def test_gluon_scan_reads_pages_through_the_tma_and_multiplies_in_fp8(monkeypatch, kind):
    scan, _ = _recorded("gluon", kind, monkeypatch)

    scan.assert_no_spills()
    scan.assert_tensor_core("QGMMA")
    assert any("UTMALDG.2D" in line for line in scan.hot_loop())
    assert (scan.shared_bytes + 1024) * gluon_impl.RINGS[kind][1] <= 228 * 1024  # of a multiprocessor
    assert scan.registers * 128 * gluon_impl.RINGS[kind][1] <= 65536
    if kind == "index_fp4":  # keys are decoded in registers, in the lanes that multiply them
        assert scan.count(r"QGMMA\S* R\d+, R\d+, gdesc") == 8


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["index_fp8", "index_fp4"])
@pytest.mark.parametrize(
    ("visible", "columns", "heads", "topk"),
    [
        ([], 2, 64, 8),
        ([0, 1, 15, 16, 17], 1, 64, 16),
        ([63, 64, 65, 127, 128, 129], 4, 24, 24),
        ([2047, 0, 2048, 2049, 2200], 35, 64, 512),
        ([4095, 4097], 65, 128, 2048),
        ([1] * 500 + [900] * 600, 15, 16, 40),
    ],
)
def test_gluon_slots_are_those_of_the_reference_with_many_ties(cuda, generator, kind, visible, columns, heads, topk):
    head, pool, tail = _batch(kind, visible, columns, generator, heads=heads, dim=128, device=cuda)

    with guarded_allocations():
        slots, lengths = index_slots(*head, pool, *tail, topk, impl="gluon")

    expected = index_slots(*head, pool, *tail, topk, impl="reference")
    assert_fully_written(slots, lengths)
    assert same_bits(lengths, expected[1]) and same_bits(slots, expected[0])


@pytest.mark.gpu
def test_fp4_groups_of_any_exponents_are_exact(cuda, generator):
    """One head sees one value of every group: scores are those values, exactly, whatever stands beside them."""
    (q, weights), pool, tail = _batch("index_fp4", [3000], 47, generator, heads=16, dim=128, device=cuda)
    slots = (tail[0][0].unsqueeze(1) * 64 + torch.arange(64, device=cuda)).flatten()[:3000]
    exponents = torch.randint(-30, 30, (3000, 4, 1), generator=generator)
    pool.write(slots, (torch.randn(3000, 4, 32, generator=generator) * 2.0**exponents).view(3000, 128).to(cuda))
    q, weights = torch.zeros_like(q), torch.zeros_like(weights)
    weights[:, 0] = 1.0
    for group in range(4):
        q[:, 0, :] = 0
        q[:, 0, 32 * group + 5] = 1
        got = index_slots(q, weights, pool, *tail, 200, impl="gluon")
        assert all(map(same_bits, got, index_slots(q, weights, pool, *tail, 200, impl="reference")))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("kind", ["index_fp8", "index_fp4"])
def test_tokens_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator, kind, impl):
    visible = [5000, 512, 513, 0, 4999, 2048]
    (q, weights), pool, tail = _batch(kind, visible, 80, generator, heads=64, dim=128, small=False, device=cuda)
    other = torch.tensor([511, 4000, 5000 - 4488, 0, 2049, 1], device=cuda)

    def op(q, weights, table, seqs, num_visible):
        return index_slots(q, weights, pool, table, seqs, num_visible, 512, impl=impl)

    inputs = (q, weights, *tail)
    assert_batch_invariant(op, inputs, batched=[0, 1, 3, 4], rows=[[0], [4], [5, 2], range(5), [0, 0, 3]])
    assert_graph_replays(op, inputs, (q.flip(0), weights.flip(0), tail[0], tail[1], torch.minimum(other, tail[2])))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("kind", ["index_fp8", "index_fp4"])
def test_a_million_tokens_of_context_with_many_ties(cuda, generator, kind, impl):
    visible = [262144, 262143, 262080]
    head, pool, tail = _batch(kind, visible, 4096, generator, heads=64, dim=128, device=cuda)

    with guarded_allocations():
        slots, lengths = index_slots(*head, pool, *tail, 512, impl=impl)

    expected = index_slots(*head, pool, *tail, 512, impl="reference")
    assert same_bits(slots, expected[0]) and same_bits(lengths, expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["index_fp8", "index_fp4"])
def test_gluon_leaves_nothing_better_out(cuda, generator, kind):
    _assert_nothing_better_is_left_out("gluon", kind, 64, generator, cuda)
