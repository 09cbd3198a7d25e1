"""A compressor's whole step: entries and states; the reference, Triton interpreted, compiled for sm_90a, on the GPU."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dsv4_kernels.compressor import CompressorBatch, CompressorPart, compress
from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.rope import plain_frequencies, rotations
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import guarded_allocations
from tests.kit.sm90a import recorded_launches

EPS = 1e-6
F32, BF16 = torch.float32, torch.bfloat16
PLAIN = RowFormat("plain", 64, dtype=F32)
KV = RowFormat("kv_fp8", 96, 32, BF16)
KEYS = RowFormat("index_fp8", 64, 32, BF16)
KEYS_FP4 = RowFormat("index_fp4", 128, 32, BF16)
ROPE_DIM = 32
HEADROOM = 3
PAGE_TOKENS = 256


class Cache:
    """Pools of one compressor for a few sequences; every byte that nothing has written is set."""

    def __init__(self, fmt, ratio, generator, device, num_seqs=3, rotated=False):
        sets = 2 if ratio == 4 else 1
        self.ratio, self.sets, self.fmt, self.rotated, self.device = ratio, sets, fmt, rotated, device
        self.ape = torch.randn(ratio, sets * fmt.dim, generator=generator).to(device)
        self.weight = torch.rand(fmt.dim, generator=generator).to(device)
        self.state = PagedRows.allocate(
            RowFormat("plain", 2 * sets * fmt.dim), num_seqs + 1, sets * ratio + HEADROOM, device
        )
        self.entries = PagedRows.allocate(fmt, 3 * num_seqs, PAGE_TOKENS // ratio, device)
        self.state.pages.fill_(0xFF)  # NaN
        self.entries.pages.fill_(0xA5)

    def part(self, tokens):
        """tokens: [T, 2 * sets * dim]; kv and gate are strided views of it."""
        kv, gate = tokens.split(self.sets * self.fmt.dim, dim=1)
        return CompressorPart(kv, gate, self.ape, self.weight, self.state, self.entries, self.rotated)

    @property
    def width(self):
        return 2 * self.sets * self.fmt.dim


def batch_of(spans, page_table, ratio, device, padding=0):
    """spans: (first position, number of tokens) of each sequence. padding: rows that are none, at the end."""
    positions = torch.cat([torch.arange(first, first + count) for first, count in spans] + [torch.full((padding,), -1)])
    seqs = torch.cat([torch.full((count,), i) for i, (_, count) in enumerate(spans)] + [torch.zeros(padding)]).long()
    bounds = torch.tensor([0] + [count for _, count in spans]).cumsum(0)
    slots = torch.arange(len(spans), 0, -1)
    cis = rotations(positions - ratio + 1, plain_frequencies(ROPE_DIM, 10000.0))
    longest = max(count for _, count in spans)
    return CompressorBatch(
        *(value.to(device) for value in (positions, seqs, bounds, slots, page_table, cis)), max_seqlen_q=longest
    )


def pages(num_seqs):
    """Pages in an order of their own; every sequence has two, and no third."""
    return torch.stack([torch.tensor([3 * i + 2, 3 * i, -1]) for i in range(num_seqs)])


def run(cache, tokens, spans, impl, padding=0):
    """One step. tokens: per sequence [n, width] of all its tokens."""
    fresh = [rows[first : first + count] for rows, (first, count) in zip(tokens, spans, strict=True)]
    fresh.append(torch.full((padding, cache.width), float("nan"), device=cache.device))
    batch = batch_of(spans, pages(len(spans)), cache.ratio, cache.device, padding)
    with guarded_allocations():
        compress([cache.part(torch.cat(fresh))], batch, ratio=cache.ratio, eps=EPS, impl=impl)


def pair(fmt, ratio, generator, device, **options):
    """Two caches with the same parameters, the second for the reference."""
    one = Cache(fmt, ratio, generator, device, **options)
    other = Cache(fmt, ratio, generator, device, **options)
    other.ape, other.weight = one.ape, one.weight
    return one, other


def draw(cache, lengths, generator):
    return [(2 * torch.randn(n, cache.width, generator=generator)).to(cache.device) for n in lengths]


STEPS = {
    4: [[(0, 3), (0, 4), (0, 1)], [(3, 1), (4, 4), (1, 7)], [(4, 2), (8, 1), (8, 20)]],
    128: [[(0, 127), (0, 3), (0, 128)], [(127, 1), (3, 2), (128, 4)], [(128, 3), (5, 124), (132, 1)]],
}


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_and_states_equal_the_reference_step_by_step(triton_device, generator, ratio):
    cache, expected = pair(PLAIN, ratio, generator, triton_device)
    tokens = draw(cache, (160, 160, 160), generator)

    for spans in STEPS[ratio]:
        run(cache, tokens, spans, "triton", padding=2)
        run(expected, tokens, spans, "reference")

    assert torch.equal(cache.state.pages, expected.state.pages)
    num_slots = cache.entries.num_pages * cache.entries.rows_per_page
    every = torch.arange(num_slots, device=triton_device)
    actual, reference = cache.entries.gather(every), expected.entries.gather(every)
    untouched = (expected.entries.pages.view(num_slots, -1) == 0xA5).all(1)
    assert 0 < int((~untouched).sum()) < num_slots
    assert torch.equal(actual[untouched], reference[untouched])
    # A weighted mean of values up to 8, a norm and a rotation, all in fp32, of at most 128 terms.
    assert_within(actual[~untouched], reference[~untouched].double(), 512 * unit_roundoff(F32))


@pytest.mark.parametrize(
    ("fmt", "ratio", "rotated"), [(KV, 4, False), (KV, 128, False), (KEYS, 4, False), (KEYS_FP4, 4, True)]
)
def test_stored_bytes_are_those_of_the_pool_for_the_rounded_entries(triton_device, generator, fmt, ratio, rotated):
    cache, plain = pair(fmt, ratio, generator, triton_device, rotated=rotated)
    plain.fmt = RowFormat("plain", fmt.dim, dtype=BF16)
    plain.entries = PagedRows.allocate(plain.fmt, 9, PAGE_TOKENS // ratio, triton_device)
    plain.entries.pages.fill_(0xA5)
    length = ratio + 4
    tokens = draw(cache, (length, 8, 0), generator)
    spans = [(0, length), (0, 8), (0, 0)]

    run(cache, tokens, spans, "triton")
    run(plain, tokens, spans, "triton")

    counts = [length // ratio, 8 // ratio]
    slots = torch.cat([page * 256 // ratio + torch.arange(n) for page, n in zip((2, 5), counts, strict=True)])
    expected = Cache(fmt, ratio, generator, triton_device)
    expected.entries.write(slots.to(triton_device), plain.entries.gather(slots.to(triton_device)))
    assert torch.equal(cache.entries.pages, expected.entries.pages)


@pytest.mark.parametrize("ratio", [4, 128])
def test_any_division_into_steps_gives_the_same_bits(triton_device, generator, ratio):
    whole, parts = pair(KV, ratio, generator, triton_device)
    tokens = draw(whole, (ratio + 6,), generator)

    run(whole, tokens, [(0, ratio + 6)], "triton")
    bounds = (0, 1, ratio - 1, ratio, ratio + 3, ratio + 6)
    for first, last in pairwise(bounds):
        run(parts, tokens, [(first, last - first)], "triton")

    assert torch.equal(whole.entries.pages, parts.entries.pages)


@pytest.mark.parametrize("ratio", [4, 128])
def test_rejected_drafts_leave_no_trace(triton_device, generator, ratio):
    cache, plain = pair(KV, ratio, generator, triton_device)
    tokens = draw(cache, (ratio + 8,), generator)
    wrong = draw(cache, (ratio + 8,), generator)
    start = ratio - 2

    for each in (cache, plain):
        run(each, tokens, [(0, start)], "triton")
    run(cache, wrong, [(start, 4)], "triton")  # three drafts, all rejected; the first row is computed again
    for first in range(start, ratio + 5):
        for each in (cache, plain):
            run(each, tokens, [(first, 1)], "triton")

    assert torch.equal(cache.entries.pages, plain.entries.pages)


def test_two_compressors_share_a_launch(triton_device, generator):
    main, keys = (Cache(fmt, 4, generator, triton_device) for fmt in (KV, KEYS))
    alone = [Cache(fmt, 4, generator, triton_device) for fmt in (KV, KEYS)]
    tokens = [draw(each, (21,), generator) for each in (main, keys)]
    batch = batch_of([(0, 21)], pages(1), 4, triton_device)

    compress([main.part(tokens[0][0]), keys.part(tokens[1][0])], batch, ratio=4, eps=EPS, impl="triton")
    for each, paired, rows in zip(alone, (main, keys), tokens, strict=True):
        each.ape, each.weight = paired.ape, paired.weight
        run(each, rows, [(0, 21)], "triton")

        assert torch.equal(each.entries.pages, paired.entries.pages)
        assert torch.equal(each.state.pages, paired.state.pages)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_entries_without_a_page_and_empty_steps_write_nothing(triton_device, generator, impl):
    cache = Cache(KV, 4, generator, triton_device)
    tokens = draw(cache, (530,), generator)
    cache.state.pages.zero_()

    run(cache, tokens, [(512, 8)], impl)  # page 2 of the table is none
    run(cache, tokens, [(0, 0)], impl)

    assert (cache.entries.pages == 0xA5).all()


def test_a_ring_that_is_too_short_is_refused(generator):
    cache = Cache(PLAIN, 4, generator, "cpu")
    part = cache.part(torch.zeros(1, cache.width))
    short = replace(part, state=PagedRows.allocate(part.state.format, 1, 7, "cpu"))

    with pytest.raises(ValueError, match="ring of 7 rows is shorter than 8"):
        compress([short], batch_of([(0, 1)], pages(1), 4, "cpu"), ratio=4, eps=EPS)


@pytest.mark.parametrize(
    ("ratio", "keys", "max_seqlen_q"),
    [(4, RowFormat("index_fp4", 128, 64, BF16), 1), (4, RowFormat("index_fp8", 128, 64, BF16), 4096), (128, None, 1)],
)
def test_compiles_for_hopper_with_wide_loads_and_without_spills(ratio, keys, max_seqlen_q):
    def meta(*shape, dtype=F32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def part(fmt):
        channels = (2 if ratio == 4 else 1) * fmt.dim
        state = PagedRows.allocate(RowFormat("plain", 2 * channels), 4, (8 if ratio == 4 else 128) + HEADROOM, "meta")
        tokens = meta(128, 2 * channels)
        return CompressorPart(
            tokens[:, :channels], tokens[:, channels:], meta(ratio, channels), meta(fmt.dim), state,
            PagedRows.allocate(fmt, 4, 256 // ratio, "meta"), fmt.kind == "index_fp4",
        )  # fmt: skip

    ints = [meta(size, dtype=torch.int64) for size in (128, 128, 129, 128)]
    batch = CompressorBatch(*ints, meta(128, 64, dtype=torch.int64), meta(128, 32, dtype=torch.complex64), max_seqlen_q)
    parts = [part(RowFormat("kv_fp8", 512, 64, BF16))] + ([part(keys)] if keys else [])
    with recorded_launches() as launches:
        compress(parts, batch, ratio=ratio, eps=EPS, impl="triton")

    assert len(launches) == (1 if max_seqlen_q <= HEADROOM + 1 else 2)
    kernels = [launch.compile() for launch in launches]
    for kernel in kernels:
        kernel.assert_no_spills()
    kernels[0].assert_128bit_loads()
    if ratio == 4:
        assert kernels[0].registers <= 80, "fewer than three programs of 256 threads fit a multiprocessor"


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_captured_step_follows_positions_on_the_device(cuda, generator, ratio):
    cache, expected = pair(KV, ratio, generator, cuda)
    tokens = draw(cache, (160,), generator)
    for each in (cache, expected):
        run(each, tokens, [(0, 120)], "triton")
    static = tokens[0][120:121].clone()
    part, batch = cache.part(static), batch_of([(120, 1)], pages(1), ratio, cuda)
    compress([part], batch, ratio=ratio, eps=EPS, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compress([part], batch, ratio=ratio, eps=EPS, impl="triton")

    for position in range(120, 150):
        static.copy_(tokens[0][position : position + 1])
        fresh = batch_of([(position, 1)], pages(1), ratio, cuda)
        for name in ("positions", "cis"):
            getattr(batch, name).copy_(getattr(fresh, name))
        graph.replay()
        run(expected, tokens, [(position, 1)], "triton")

    assert torch.equal(cache.entries.pages, expected.entries.pages)
    assert torch.equal(cache.state.pages, expected.state.pages)
