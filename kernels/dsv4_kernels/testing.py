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


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest in `dtype`."""
    return torch.finfo(dtype).eps / 2


def assert_within(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float) -> None:
    """Every element within its own derived bound of a reference in higher precision; NaN only where expected.

    actual: [...]. expected: [...] fp64. bound: absolute, a number or broadcast to [...].
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = (actual.double() - expected).abs()
    wrong = ~((error <= bound) | (actual.isnan() & expected.isnan()) | (actual.double() == expected))
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        limit = torch.as_tensor(bound).expand_as(expected)[at]
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} outside their bound; first at {at}: {float(actual[at])}, "
            f"expected {float(expected[at])} within {float(limit)}"
        )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in the Euclidean norm, in fp64; 0 for empty tensors, NaN stays NaN."""
    norm = float(expected.double().norm())
    error = float((actual.double() - expected.double()).norm())
    return error / norm if norm else error
