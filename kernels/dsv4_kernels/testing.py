"""Input generators and comparators that tests and benchmarks of the kernels share."""

import torch

from dsv4_kernels.kv.rows import PagedRows, RowFormat


def nan_pool(fmt: RowFormat, num_pages: int, rows_per_page: int) -> PagedRows:
    """A pool in which every row is NaN (all bytes 0xFF): a row that is read without having been written shows up."""
    pool = PagedRows.allocate(fmt, num_pages, rows_per_page, "cpu")
    pool.pages.fill_(0xFF)
    return pool


def scattered_slots(num_rows: int, num_slots: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct slots in random order. Returns: [num_rows] int64."""
    return torch.randperm(num_slots, generator=generator)[:num_rows]


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference in fp64; inf where the shapes differ or exactly one side is NaN."""
    if actual.shape != expected.shape or not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    return float((actual.double() - expected.double()).nan_to_num().abs().max())
