"""Window rows: normed, rotated, rounded and stored; slots that are none store nothing. References and Triton."""

import pytest
import torch

from dsv4_kernels.kv.op import insert
from dsv4_kernels.kv.rows import PagedRows, RowFormat, round_rows
from dsv4_kernels.rope import norm_rope, plain_frequencies, rotations
from dsv4_kernels.testing import assert_within, unit_roundoff
from tests.kit.kernel_checks import (
    assert_batch_invariant,
    assert_fully_written,
    assert_graph_replays,
    guarded_allocations,
    same_bits,
)
from tests.kit.sm90a import recorded_launches

EPS = 1e-6
BF16 = torch.bfloat16
FLASH = RowFormat("kv_fp8", 512, 64, BF16)
SMALL = RowFormat("kv_fp8", 96, 32, BF16)
PLAIN = RowFormat("plain", 96, dtype=BF16)


def _pool(fmt, device, num_pages=3, rows_per_page=5):
    """A pool whose every byte is set: what is not written stays as it is."""
    pool = PagedRows.allocate(fmt, num_pages, rows_per_page, device)
    pool.pages.fill_(0xA5)
    return pool


def _rows(num_rows, fmt, generator, device):
    rope_dim = fmt.rope_dim or 32
    kv = (3 * torch.randn(num_rows, fmt.dim, generator=generator)).to(BF16)
    weight = torch.rand(fmt.dim, generator=generator)
    positions = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    cis = rotations(positions, plain_frequencies(rope_dim, 10000.0))
    return kv.to(device), weight.to(device), cis.to(device)


@pytest.mark.parametrize("fmt", [FLASH, SMALL, PLAIN])
@pytest.mark.parametrize("slots", [[], [14], [-1, -7, 15, 1 << 40], [4, 5, 0, -1, 15, 9]])
def test_stored_bytes_are_those_of_the_pool_for_the_rotated_rows(triton_device, generator, fmt, slots):
    kv, weight, cis = _rows(len(slots), fmt, generator, triton_device)
    kv[:1, :64] = 0  # a group without any value has the scale of the floor
    index = torch.tensor(slots, dtype=torch.int64, device=triton_device)
    plain = RowFormat("plain", fmt.dim, dtype=BF16)
    pool = _pool(fmt, triton_device)

    with guarded_allocations():
        back = insert(kv, weight, EPS, cis, pool, index, impl="triton")
        turned = insert(kv, weight, EPS, cis, _pool(plain, triton_device), index, impl="triton")

    assert_fully_written(back, turned)
    expected = _pool(fmt, triton_device)
    expected.write(torch.where(index < 15, index, -1), turned)
    assert torch.equal(pool.pages, expected.pages)
    assert same_bits(back, round_rows(fmt, turned))
    # rotation of values rounded once, then rounded again: see test_rope_triton.py
    reference = norm_rope(kv, weight, EPS, cis, impl="reference")
    pair = reference.double().abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    assert_within(turned, reference.double(), 4.2 * unit_roundoff(BF16) * pair)


def test_the_reference_ignores_slots_that_are_none(generator):
    kv, weight, cis = _rows(4, SMALL, generator, "cpu")
    pool = _pool(SMALL, "cpu")

    back = insert(kv, weight, EPS, cis, pool, torch.tensor([-1, 15, 3, -9]), impl="reference")

    expected = _pool(SMALL, "cpu")
    expected.write(torch.tensor([3]), norm_rope(kv, weight, EPS, cis, impl="reference")[2:3])
    assert torch.equal(pool.pages, expected.pages)
    assert torch.equal(back[2], pool.gather(torch.tensor([3]))[0])


def test_a_pool_of_indexer_keys_is_refused():
    pool = PagedRows.allocate(RowFormat("index_fp8", 128), 1, 4, "cpu")

    with pytest.raises(ValueError, match="expected a format of"):
        insert(torch.zeros(1, 128), torch.ones(128), EPS, torch.zeros(1, 32, dtype=torch.complex64), pool,
               torch.zeros(1, dtype=torch.int64))  # fmt: skip


def test_compiles_for_hopper_with_wide_loads_and_without_spills():
    pool = PagedRows.allocate(FLASH, 4, 136, "meta")
    with recorded_launches() as launches:
        insert(torch.empty(128, 512, dtype=BF16, device="meta"), torch.empty(512, device="meta"), EPS,
               torch.empty(128, 32, dtype=torch.complex64, device="meta"), pool,
               torch.empty(128, dtype=torch.int64, device="meta"), impl="triton")  # fmt: skip

    kernel = launches[0].compile()
    kernel.assert_no_spills()
    kernel.assert_128bit_loads()


@pytest.mark.gpu
def test_rows_do_not_depend_on_the_batch_and_graphs_replay(cuda, generator):
    pool = _pool(FLASH, cuda, 128, 136)
    first, second = (_rows(128, FLASH, generator, cuda) for _ in range(2))
    slots = [torch.randperm(128 * 136, generator=generator)[:128].to(cuda) for _ in range(2)]

    def op(kv, weight, cis, index):
        pool.pages.fill_(0xA5)
        back = insert(kv, weight, EPS, cis, pool, index, impl="triton")
        return back, pool.gather(index)

    assert_batch_invariant(op, (*first, slots[0]), batched=[0, 2, 3], rows=[[0], range(7), [9, 127]])
    assert_graph_replays(op, (*first, slots[0]), (*second, slots[1]))
