"""Paged rows: what is written reads back as its fake quantisation, and nothing else in the pool moves."""

import pytest
import torch

from dsv4_kernels.kv.rows import PagedRows, RowFormat, page_bytes, round_rows
from dsv4_kernels.quant import fake_quant_index, fake_quant_kv

NUM_PAGES, ROWS_PER_PAGE = 3, 7  # an odd page size, so that page padding is not zero
FORMATS = {
    "plain": lambda dtype: RowFormat("plain", 40, dtype=dtype),
    "plain_odd": lambda dtype: RowFormat("plain", 5, dtype=dtype),
    "kv_fp8": lambda dtype: RowFormat("kv_fp8", 512, 64, dtype),
    "kv_fp8_toy": lambda dtype: RowFormat("kv_fp8", 128, 64, dtype),
    "index_fp8": lambda dtype: RowFormat("index_fp8", 128, dtype=dtype),
    "index_fp8_toy": lambda dtype: RowFormat("index_fp8", 64, dtype=dtype),
    "index_fp4": lambda dtype: RowFormat("index_fp4", 128, dtype=dtype),
    "index_fp4_toy": lambda dtype: RowFormat("index_fp4", 64, dtype=dtype),
}
ROW_BYTES = {"kv_fp8": 584, "index_fp8": 132, "index_fp4": 68}  # head_dim 512, index_head_dim 128. Source: spec 6.1


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(params=FORMATS)
def fmt(request, dtype) -> RowFormat:
    return FORMATS[request.param](dtype)


@pytest.fixture
def pool(fmt) -> PagedRows:
    """A pool whose every byte is 0xFF: NaN in every float format and scale."""
    rows = PagedRows.allocate(fmt, NUM_PAGES, ROWS_PER_PAGE, "cpu")
    rows.pages.fill_(0xFF)
    return rows


def random_rows(num_rows: int, fmt: RowFormat) -> torch.Tensor:
    """Rows of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(num_rows)
    magnitude = torch.logspace(-6, 4, num_rows).unsqueeze(1)
    rows = torch.randn(num_rows, fmt.dim, generator=generator) * magnitude
    rows[num_rows // 2] = 0.0
    return rows.to(fmt.dtype)


def fake_quant(fmt: RowFormat, rows: torch.Tensor) -> torch.Tensor:
    if fmt.kind == "plain":
        return rows
    if fmt.kind == "kv_fp8":
        return fake_quant_kv(rows, fmt.rope_dim)
    return fake_quant_index(rows, fmt.kind.removeprefix("index_"))


def all_slots() -> torch.Tensor:
    return torch.arange(NUM_PAGES * ROWS_PER_PAGE)


def test_a_new_pool_reads_as_zeros(fmt):
    pool = PagedRows.allocate(fmt, NUM_PAGES, ROWS_PER_PAGE, "cpu")

    assert torch.equal(pool.gather(all_slots()), torch.zeros(NUM_PAGES * ROWS_PER_PAGE, fmt.dim, dtype=fmt.dtype))


def test_gather_of_written_rows_equals_fake_quantisation_bitwise(fmt, pool):
    slots = torch.randperm(NUM_PAGES * ROWS_PER_PAGE, generator=torch.Generator().manual_seed(0))
    rows = random_rows(len(slots), fmt)

    pool.write(slots, rows)

    assert torch.equal(pool.gather(slots), fake_quant(fmt, rows))


def test_round_rows_equals_write_then_gather(fmt, pool):
    rows = random_rows(9, fmt)

    pool.write(all_slots()[:9], rows)

    assert torch.equal(round_rows(fmt, rows), pool.gather(all_slots()[:9]))


def test_gather_keeps_the_shape_of_the_slots(fmt, pool):
    slots = all_slots()[:12]
    pool.write(slots, random_rows(12, fmt))

    gathered = pool.gather(slots.view(2, 3, 2))

    assert gathered.dtype == fmt.dtype
    assert torch.equal(gathered, pool.gather(slots).view(2, 3, 2, fmt.dim))


def test_no_slots_are_legal(fmt, pool):
    none = torch.empty(0, dtype=torch.int64)

    pool.write(none, torch.empty(0, fmt.dim))
    pool.write_raw(none, torch.empty(0, pool.row_bytes, dtype=torch.uint8))

    assert pool.gather(none).shape == (0, fmt.dim)
    assert pool.gather(none.view(0, 4)).shape == (0, 4, fmt.dim)
    assert pool.read_raw(none).shape == (0, pool.row_bytes)


def test_negative_slots_gather_zeros_even_from_nan_bytes(fmt, pool):
    pool.write(torch.tensor([4]), random_rows(3, fmt)[:1])

    gathered = pool.gather(torch.tensor([-1, 4, -7]))

    assert torch.equal(gathered[[0, 2]], torch.zeros(2, fmt.dim, dtype=fmt.dtype))
    assert torch.equal(gathered[1], pool.gather(torch.tensor([4]))[0])


def test_negative_slots_write_nothing(fmt, pool):
    pool.write(torch.tensor([-1, 2, -5]), random_rows(3, fmt))
    only_row_2 = pool.pages.clone()

    pool.write(torch.tensor([-1, -5]), random_rows(2, fmt))

    assert torch.equal(pool.pages, only_row_2)
    assert torch.equal(pool.gather(torch.tensor([2]))[0], fake_quant(fmt, random_rows(3, fmt))[1])


def test_write_leaves_every_other_byte_alone(fmt, pool):
    before = pool.read_raw(all_slots())

    pool.write(torch.tensor([9]), random_rows(1, fmt) + 1)

    changed = (pool.read_raw(all_slots()) != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [9]
    assert int((pool.pages != 0xFF).sum()) <= pool.row_bytes


def test_slots_out_of_range_are_refused(fmt, pool):
    beyond = torch.tensor([NUM_PAGES * ROWS_PER_PAGE])

    with pytest.raises(IndexError):
        pool.gather(beyond)
    with pytest.raises(IndexError):
        pool.write(beyond, torch.ones(1, fmt.dim))


def test_rows_may_be_strided_and_of_another_dtype(fmt, pool):
    rows = random_rows(6, fmt)
    strided = rows.double().t().contiguous().t()[::2]

    pool.write(all_slots()[:3], strided)

    assert torch.equal(pool.gather(all_slots()[:3]), fake_quant(fmt, rows[::2]))


def test_raw_bytes_survive_a_move_to_another_page_geometry(fmt, pool):
    noise = torch.randint(0, 256, pool.pages.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pool.pages.copy_(noise)
    other = PagedRows.allocate(fmt, 11, 2, "cpu")
    source, target = torch.tensor([20, 0, 7, 6]), torch.tensor([3, 21, 0, 12])

    other.write_raw(target, pool.read_raw(source))

    assert torch.equal(other.read_raw(target), pool.read_raw(source))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_raw_bytes_may_come_from_unaligned_memory(fmt, pool, num_rows):
    raw = pool.read_raw(torch.arange(num_rows))
    raw.copy_(torch.arange(raw.numel()).view_as(raw) % 251)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), raw.flatten()))[1:].view_as(raw)

    pool.write_raw(torch.arange(num_rows) + 5, shifted)

    assert torch.equal(pool.read_raw(torch.arange(num_rows) + 5), raw)


@pytest.mark.parametrize("kind", ROW_BYTES)
def test_row_payload_has_the_published_size(kind):
    fmt = FORMATS[kind](torch.bfloat16)

    assert PagedRows.allocate(fmt, 1, 2, "cpu").row_bytes == ROW_BYTES[kind]


@pytest.mark.parametrize(
    ("kind", "rows_per_page", "num_bytes"),
    [("kv_fp8", 64, 37_440), ("kv_fp8", 2, 1_728), ("index_fp8", 64, 8_448), ("index_fp4", 64, 64 * 68)],
)
def test_page_has_the_published_size(kind, rows_per_page, num_bytes):
    fmt = FORMATS[kind](torch.bfloat16)

    assert page_bytes(fmt, rows_per_page) == num_bytes
    assert PagedRows.allocate(fmt, 5, rows_per_page, "cpu").num_bytes == 5 * num_bytes


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="100 quantised dims"):
        PagedRows.allocate(RowFormat("kv_fp8", 164, 64), 1, 2, "cpu")
