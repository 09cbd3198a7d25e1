"""Benchmark cases of cache transfer: the compressed pages of one layer of a long prompt."""

from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase
from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.transfer import pack, unpack

_FORMATS = {"kv_fp8": RowFormat("kv_fp8", 512, 64, torch.bfloat16), "index_fp8": RowFormat("index_fp8", 128, 64)}
_PAGE_ROWS, _NUM_PAGES = 64, 4096


def cases() -> list[KernelCase]:
    return [_case(kind, way) for kind in _FORMATS for way in ("pack", "unpack")]


def _case(kind: str, way: str) -> KernelCase:
    fmt, num_rows = _FORMATS[kind], _PAGE_ROWS * _NUM_PAGES
    row_bytes = 584 if kind == "kv_fp8" else 132

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        pool = PagedRows.allocate(fmt, _NUM_PAGES, _PAGE_ROWS, device)
        pool.pages.random_(generator=generator)
        pages = torch.randperm(_NUM_PAGES, generator=generator, device=device)
        slots = (pages[:, None] * _PAGE_ROWS + torch.arange(_PAGE_ROWS, device=device)).flatten()
        return [(pool, slots, pack(pool, slots)[0]) for _ in range(2)]

    def run(inputs: tuple[Any, ...]) -> Any:
        return pack(*inputs[:2]) if way == "pack" else unpack(*inputs)

    return KernelCase(
        name=f"transfer {way}", shape=f"{num_rows} rows of {kind}", make_inputs=make_inputs, run=run,
        bytes_moved=num_rows * (2 * row_bytes + 8), flops=num_rows * row_bytes / 8 * 30, roof="bandwidth",
        target_fraction=0.6, stretch_fraction=0.8,
    )  # fmt: skip
