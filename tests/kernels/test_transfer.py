"""Segments: the bytes of rows, both ways, and their checksum. The reference and Triton."""

import pytest
import torch

from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.transfer import checksum, pack, unpack
from tests.kit.kernel_checks import assert_graph_replays, guarded_allocations
from tests.kit.sm90a import recorded_launches

FORMATS = [
    RowFormat("kv_fp8", 512, 64, torch.bfloat16),  # 584 bytes
    RowFormat("index_fp8", 128),  # 132
    RowFormat("index_fp4", 128),  # 68
    RowFormat("plain", 24, dtype=torch.float32),
    RowFormat("plain", 3, dtype=torch.bfloat16),  # 6: no multiple of a word
]
SLOTS = [[], [29], [4, 5, 9, 0, 28, 10, 14, 15], [-1, 30, 7, 1 << 40]]


def _pool(fmt, generator, device):
    pool = PagedRows.allocate(fmt, 6, 5, "cpu")
    pool.pages.random_(generator=generator)
    return PagedRows(fmt, pool.pages.to(device), 5)


def _formula(raw):
    """With Python's integers; see op.py."""
    mask = (1 << 64) - 1

    def mix64(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    total, width = raw.numel(), -(-raw.shape[1] // 8)
    for r, row in enumerate(raw.tolist()):
        for c in range(width):
            word = int.from_bytes(bytes(row[8 * c : 8 * c + 8]).ljust(8, b"\0"), "little")
            total += mix64(word + (r * width + c + 1) * 0x9E3779B97F4A7C15 & mask)
    total &= mask
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_travel_as_their_payload(triton_device, generator, fmt, slots, impl):
    source = _pool(fmt, generator, triton_device)
    index = torch.tensor(slots, dtype=torch.int64, device=triton_device)

    with guarded_allocations():
        raw, total = pack(source, index, impl=impl)

    is_row = (index >= 0) & (index < 30)
    assert torch.equal(raw[is_row], source.read_raw(index[is_row])) and (raw[~is_row] == 0).all()
    assert total.tolist() == [_formula(raw.cpu())]
    assert torch.equal(checksum(raw, impl=impl), total)

    target, expected = (_pool(fmt, generator.manual_seed(1), triton_device) for _ in range(2))
    expected.write_raw(index[is_row], raw[is_row])
    with guarded_allocations():
        assert torch.equal(unpack(target, index, raw, impl=impl), total)
    assert torch.equal(target.pages, expected.pages)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_checksum_sees_a_flipped_bit_an_exchange_and_a_missing_row(triton_device, generator, impl):
    raw = torch.randint(0, 256, (9, 68), generator=generator, dtype=torch.uint8).to(triton_device)
    flipped, exchanged = raw.clone(), raw.clone()
    flipped[4, 67] ^= 1
    exchanged[[2, 3]] = raw[[3, 2]]
    zeros = torch.zeros_like(raw)

    sums = [checksum(each, impl=impl).item() for each in (raw, flipped, exchanged, raw[:8], zeros, zeros[:8])]

    assert len(set(sums)) == len(sums)


def test_raw_of_another_width_is_refused(generator):
    pool = _pool(FORMATS[1], generator, "cpu")

    with pytest.raises(ValueError, match=r"expected \(2, 132\)"):
        unpack(pool, torch.tensor([0, 1]), torch.zeros(2, 131, dtype=torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS[:3])
def test_compiles_for_hopper_without_spills_and_copies_along_rows(fmt):
    pool = PagedRows.allocate(fmt, 64, 64, "meta")
    slots = torch.empty(4096, dtype=torch.int64, device="meta")
    with recorded_launches() as launches:
        pack(pool, slots, impl="triton")
        raw = torch.empty(4096, pool.row_bytes, dtype=torch.uint8, device="meta")
        unpack(pool, slots, raw, impl="triton")
        checksum(raw, impl="triton")

    for launch in launches:
        kernel = launch.compile()
        kernel.assert_no_spills()
        kernel.assert_lanes_run_along_rows()


@pytest.mark.gpu
def test_a_captured_copy_follows_its_slots(cuda, generator):
    source = PagedRows.allocate(FORMATS[0], 100, 64, cuda)
    source.pages.random_()
    target = PagedRows.allocate(FORMATS[0], 100, 64, cuda)
    slots = [torch.randperm(6400, generator=generator)[:1000].to(cuda) for _ in range(2)]

    def op(index):
        raw, total = pack(source, index, impl="triton")
        return raw, total, unpack(target, index, raw, impl="triton"), target.read_raw(index)

    assert_graph_replays(op, (slots[0],), (slots[1],))
