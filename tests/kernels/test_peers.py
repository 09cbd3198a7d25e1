"""Kernels of other libraries: found where they import, brought into their layouts, and timed only when they agree."""

from dataclasses import dataclass, replace

import pytest
import torch

from dsv4_kernels.attention.decode import PoolKeys, decode_attention
from dsv4_kernels.attention.keys import WindowKeys
from dsv4_kernels.attention.prefill import prefill_attention
from dsv4_kernels.bench_case import KernelCase
from dsv4_kernels.benchmark import Measurement, compare, find_cases, format_comparison, format_score, run_case
from dsv4_kernels.gemm.fp8 import Fp8Weight, fp8_linear, make_fp8_weight
from dsv4_kernels.indexer import index_slots
from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.mhc import hc_post_pre
from dsv4_kernels.moe.fp4 import Fp4Experts, fp4_experts, unpack_fp4
from dsv4_kernels.moe.fp4.inputs import random_experts, random_routing
from dsv4_kernels.peers import (
    LIBRARIES,
    Absence,
    Peer,
    PeerCall,
    PeerError,
    deep_gemm,
    deep_gemm_experts,
    describe,
    find_libraries,
    find_module,
    find_operators,
    flash_mla,
    marlin,
    one_by_one,
    prepare,
)
from dsv4_kernels.quant import Fp8Rows, fake_quant_index, quantise_fp8
from dsv4_kernels.testing import relative_error
from tests.kit import plain_deep_gemm, plain_flash_mla, plain_marlin

BF16 = torch.bfloat16
SCALE = 512**-0.5


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    experts: Fp4Experts


@dataclass(frozen=True, slots=True)
class LinearInputs:
    rows: Fp8Rows
    weight: Fp8Weight


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a module and puts it on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)

    return write


def doubling_peer(limit=0.01):
    """A library with one function `double`, for input sets of one tensor."""

    def one(library, x):
        return PeerCall(lambda: library.double(x), lambda ours, theirs: relative_error(theirs, ours))

    return Peer("flash_mla", one_by_one(one), limit, "sign")


def test_a_module_that_is_not_there_is_absent():
    assert find_module("no_such_library") == Absence(False, "not installed")


def test_a_module_that_fails_to_load_says_why(written):
    written("broken_peer", "raise OSError('libcudart.so.99: cannot open shared object file')")

    found = find_module("broken_peer")

    assert found == Absence(True, "does not import: OSError: libcudart.so.99: cannot open shared object file")


def test_a_module_that_imports_is_found(written):
    written("tiny_peer", "def double(x): return 2 * x")

    assert find_module("tiny_peer").double(3) == 6


def test_operators_of_a_package_that_is_not_there_are_absent(tmp_path, monkeypatch):
    (tmp_path / "empty_peer").mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    assert find_operators("no_such_library", "*.so", "peer") == Absence(False, "not installed")
    assert find_operators("empty_peer", "*.so", "peer") == Absence(False, "not installed")


def test_operators_that_do_not_load_say_why(tmp_path, monkeypatch):
    (tmp_path / "torn_peer").mkdir()
    (tmp_path / "torn_peer" / "_peer.abi3.so").write_bytes(b"not a library")
    monkeypatch.syspath_prepend(tmp_path)

    found = find_operators("torn_peer", "_peer*.so", "peer")

    assert found.is_installed and found.reason.startswith("does not import: OSError: Could not load this library: ")


def test_every_peer_of_a_case_names_a_library_that_is_looked_for():
    found = find_libraries()

    assert set(found) == set(LIBRARIES)
    assert {peer.library for case in find_cases() for peer in case.peers.values()} <= set(found)
    assert describe(found | {"flash_mla": torch}).startswith("other libraries: flash_mla found, deep_gemm ")


def test_a_peer_that_agrees_is_prepared_for_every_input_set(written):
    written("agreeing_peer", "def double(x): return x + x")
    inputs = [torch.ones(3), torch.arange(3.0)]

    calls = prepare(doubling_peer(), find_module("agreeing_peer"), inputs, 2 * inputs[0])

    assert torch.equal(calls[1].run(), 2 * inputs[1])


@pytest.mark.parametrize(("formula", "difference"), [("3 * x", "0.5"), ("x * float('nan')", "nan")])
def test_a_peer_that_computes_something_else_is_an_error(written, formula, difference):
    name = "wrong_peer" if difference == "0.5" else "nan_peer"
    written(name, f"def double(x): return {formula}")

    with pytest.raises(PeerError, match=f"by {difference}, limit 0.01"):
        prepare(doubling_peer(), find_module(name), [torch.ones(3)], 2 * torch.ones(3))


def test_the_faster_of_the_op_and_its_peers_wins():
    ours = Measurement("op", "shape", "run", 10.0, 9.0, 11.0, 1.0, 0.5, "target", "bandwidth")
    fast = replace(ours, variant="flash_mla", median_us=8.0, is_peer=True, lacks="sign")
    slow = replace(ours, variant="deep_gemm", median_us=15.0, is_peer=True)
    candidate = replace(ours, variant="tile 64", median_us=1.0)
    part = replace(ours, variant="deep_gemm scan", median_us=1.0, is_peer=True, is_part=True)

    comparisons = compare([ours, candidate, fast, part, slow])

    assert [format_comparison(one).split("  ")[-1] for one in comparisons] == [
        "ours 10.0 us, flash_mla 8.0 us: flash_mla wins, 1.25 x (flash_mla without sign)",
        "ours 10.0 us, deep_gemm 15.0 us: ours wins, 1.50 x",
    ]
    assert format_score(comparisons) == "ours wins 1 of 2 comparisons with other libraries"
    assert compare([fast]) == compare([ours, candidate, part]) == []


@pytest.mark.gpu
def test_a_case_times_its_peer_and_reports_one_that_differs(cuda, written):
    written("timed_peer", "def double(x): return x + x")
    right = doubling_peer()
    wrong = replace(right, prepare=lambda library, inputs: right.prepare(library, [one + 1 for one in inputs]))
    case = KernelCase(
        name="double", shape="1024", make_inputs=lambda device, _generator: [torch.ones(1024, device=device)] * 2,
        run=lambda x: 2 * x, bytes_moved=8192, flops=1024, roof="bandwidth", target_fraction=0.1,
        stretch_fraction=0.2, peers={"right": right, "wrong": wrong},
    )  # fmt: skip
    libraries = {"flash_mla": find_module("timed_peer")}

    results = list(run_case(case, {"bandwidth": 1e12}, cuda, with_variants=False, libraries=libraries))

    assert [one.variant for one in results[:2]] == ["run", "right"] and results[1].is_peer
    assert results[2].is_peer and "wrong: PeerError: differs from our result by 1, limit 0.01" in results[2].text


@pytest.mark.parametrize(("groups", "tokens"), [(1, 3), (2, 5)])
def test_deep_gemm_gets_rows_and_weights_in_its_layout(generator, groups, tokens):
    x = torch.randn(tokens, groups * 256, generator=generator).to(BF16)
    values = torch.randn(groups * 128, 256, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.randint(115, 122, (groups, 2), generator=generator, dtype=torch.uint8)
    inputs = LinearInputs(Fp8Rows(*quantise_fp8(x, 128)), make_fp8_weight(values, scales, num_groups=groups))

    calls = prepare(deep_gemm.linear_peer(), plain_deep_gemm, [inputs], fp8_linear(inputs.rows, inputs.weight))

    assert len(calls) == 1


@pytest.mark.parametrize("selects", [True, False])
def test_deep_gemm_scans_our_pages_of_keys(generator, selects):
    pool = PagedRows.allocate(RowFormat("index_fp8", 128, 64, BF16), 8, 64, "cpu")
    pool.write(torch.arange(512), torch.randn(512, 128, generator=generator))
    table = torch.randperm(8, generator=generator).view(2, 4)
    q = fake_quant_index(torch.randn(2, 64, 128, generator=generator).to(BF16), "fp8")
    weights = torch.randn(2, 64, generator=generator)
    inputs = (q, weights, pool, table, torch.arange(2), torch.full((2,), 256))
    ours = index_slots(*inputs, 32)

    calls = prepare(deep_gemm.select_peer(32) if selects else deep_gemm.scan_peer(), plain_deep_gemm, [inputs], ours)

    assert calls[0].run().shape == (2, 32 if selects else 256)


def rows_pool(kind, num_rows, rows_per_page, generator):
    pool = PagedRows.allocate(RowFormat(kind, 512, 64, BF16), num_rows // rows_per_page, rows_per_page, "cpu")
    pool.write(torch.arange(num_rows), torch.randn(num_rows, 512, generator=generator))
    return pool


def attention_inputs(num_tokens, generator):
    angle = torch.randn(num_tokens, 32, generator=generator)
    q = torch.randn(num_tokens, 8, 512, generator=generator).to(BF16)
    return q, torch.randn(8, generator=generator), torch.polar(torch.ones_like(angle), angle)


def test_flash_mla_reads_our_pages(generator):
    q, sink, cis = attention_inputs(2, generator)
    window = PoolKeys(rows_pool("kv_fp8", 2 * 6, 6, generator), torch.tensor([[1, 2], [7, 11]]))
    entries = PoolKeys(rows_pool("kv_fp8", 128, 64, generator), torch.randperm(128, generator=generator).view(2, 64))
    ours = decode_attention(q, [window, entries], sink=sink, cis=cis, scale=SCALE)

    calls = prepare(flash_mla.decode_peer(), plain_flash_mla, [(q, [window, entries], sink, cis)], ours)

    assert calls[0].run()[0].shape == (2, 1, 8, 512)


@pytest.mark.parametrize("lists", [1, 3])
def test_flash_mla_gets_the_rows_of_a_chunk_gathered(generator, lists):
    q, sink, cis = attention_inputs(3, generator)
    begin = torch.arange(3)
    window = WindowKeys(torch.randn(7, 512, generator=generator).to(BF16), begin, begin + 4)
    slots = torch.rand(lists, 64, generator=generator).argsort(1)[:, :16]
    entries = PoolKeys(rows_pool("kv_fp8", 64, 64, generator), slots)
    ours = prefill_attention(q, window, entries, sink=sink, cis=cis, scale=SCALE)

    calls = prepare(flash_mla.prefill_peer(), plain_flash_mla, [(q, window, entries, sink, cis)], ours)

    assert calls[0].run()[0].shape == (3, 8, 512)


@pytest.mark.parametrize("is_folded", [True, False])
def test_marlin_gets_the_experts_repacked(generator, is_folded):
    experts = random_experts(3, 256, 128, generator, is_folded=is_folded)
    x = torch.randn(5, 256, generator=generator).to(BF16)
    inputs = ExpertInputs(x, *random_routing(5, 2, 3, generator), experts)

    calls = prepare(marlin.experts_peer(), plain_marlin, [inputs], fp4_experts(x, inputs.ids, inputs.weights, experts))

    assert calls[0].run().shape == (5, 256)


def test_deep_gemm_gets_the_experts_in_fp8_without_loss(generator):
    experts = random_experts(2, 256, 384, generator, octaves=12)

    (w13, w13_scales), w2 = deep_gemm_experts.matrices(experts)

    rows = unpack_fp4(experts.w13).unflatten(1, (-1, 2, 128))  # tiles, gate or up
    assert torch.equal(widen(w13, w13_scales), torch.cat((rows[:, :, 0].flatten(1, 2), rows[:, :, 1].flatten(1, 2)), 1))
    assert torch.equal(widen(*w2), unpack_fp4(experts.w2))


def widen(values, scales):
    return values.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)


def test_deep_gemm_gets_the_streams_of_a_hyper_connection(generator):
    def randn(*shape):
        return torch.randn(shape, generator=generator)

    y, x, fn = randn(3, 256).to(BF16), randn(3, 4, 256).to(BF16), randn(24, 1024) / 32
    inputs = (y, x, randn(3, 4).sigmoid(), randn(3, 4, 4).softmax(1), fn, randn(3), randn(24), torch.ones(256))
    ours = hc_post_pre(*inputs[:-1], num_iters=3, eps=1e-6, norm_eps=1e-6, norm_weight=inputs[-1])

    calls = prepare(deep_gemm.mix_peer(norm_eps=1e-6), plain_deep_gemm, [inputs], ours)

    assert calls[0].run() is None
