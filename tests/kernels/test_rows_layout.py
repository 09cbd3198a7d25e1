"""Bytes of a page at the addresses that gather kernels compute. Source: spec 6.1."""

import pytest
import torch

from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.quant import quantise_fp4, quantise_fp8, quantise_index_fp8

KV_ROW, KV_DATA, KV_SCALES, KV_NOPE = 512, 576, 8, 448


def random_rows(num_rows: int, dim: int) -> torch.Tensor:
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(dim)) * 3


@pytest.mark.parametrize("rows_per_page", [64, 2])
@pytest.mark.parametrize("row_idx", [0, 1, -1])
def test_kv_fp8_bytes_are_where_the_kernels_look(rows_per_page, row_idx):
    pool = PagedRows.allocate(RowFormat("kv_fp8", KV_ROW, 64, torch.bfloat16), 3, rows_per_page, "cpu")
    page, row = 2, row_idx % rows_per_page
    x = random_rows(1, KV_ROW)

    pool.write(torch.tensor([page * rows_per_page + row]), x)

    flat = pool.pages.flatten()
    stride = pool.pages.shape[1]
    data = page * stride + row * KV_DATA
    scales = page * stride + rows_per_page * KV_DATA + row * KV_SCALES
    values, codes = quantise_fp8(x[:, :KV_NOPE], 64)
    assert stride % KV_DATA == 0
    assert torch.equal(flat[data : data + KV_NOPE], values[0].view(torch.uint8))
    assert torch.equal(flat[data + KV_NOPE : data + KV_DATA], x[0, KV_NOPE:].bfloat16().view(torch.uint8))
    assert flat[scales : scales + KV_SCALES].tolist() == [*codes[0].tolist(), 0]


def test_index_fp8_page_is_all_values_then_all_scales():
    pool = PagedRows.allocate(RowFormat("index_fp8", 128), 2, 64, "cpu")
    x = random_rows(64, 128)

    pool.write(torch.arange(64) + 64, x)

    values, scales = quantise_index_fp8(x)
    page = pool.pages[1]
    assert torch.equal(page[: 64 * 128], values.view(torch.uint8).flatten())
    assert torch.equal(page[64 * 128 :].view(torch.float32), scales)
    assert not pool.pages[0].any()


def test_index_fp4_page_is_all_values_then_all_scales():
    pool = PagedRows.allocate(RowFormat("index_fp4", 128), 2, 64, "cpu")
    x = random_rows(64, 128)

    pool.write(torch.arange(64) + 64, x)

    packed, codes = quantise_fp4(x)
    page = pool.pages[1]
    assert torch.equal(page[: 64 * 64], packed.flatten())
    assert torch.equal(page[64 * 64 :], codes.flatten())
    assert not pool.pages[0].any()


def test_raw_row_is_data_then_scales():
    pool = PagedRows.allocate(RowFormat("kv_fp8", KV_ROW, 64), 2, 2, "cpu")
    x = random_rows(1, KV_ROW)

    pool.write(torch.tensor([3]), x)

    raw = pool.read_raw(torch.tensor([3]))[0]
    values, codes = quantise_fp8(x[:, :KV_NOPE], 64)
    assert torch.equal(raw[:KV_NOPE], values[0].view(torch.uint8))
    assert torch.equal(raw[KV_NOPE:KV_DATA].view(torch.bfloat16), x[0, KV_NOPE:].bfloat16())
    assert raw[KV_DATA:].tolist() == [*codes[0].tolist(), 0]


def test_offsets_beyond_32_bits_address_the_right_page():
    # 2.6 GB of address space; only the pages of the two rows are ever touched.
    pages = torch.empty((70_000, 37_440), dtype=torch.uint8)
    pool = PagedRows(RowFormat("kv_fp8", KV_ROW, 64), pages, 64)
    slots = torch.tensor([1, 69_999 * 64 + 63])
    x = random_rows(2, KV_ROW)

    pool.write(slots, x)

    codes = quantise_fp8(x[:, :KV_NOPE], 64)[1]
    assert pages[69_999, 64 * KV_DATA + 63 * KV_SCALES :][:7].tolist() == codes[1].tolist()
    assert torch.equal(pool.gather(slots)[:, KV_NOPE:], x[:, KV_NOPE:].bfloat16().float())
