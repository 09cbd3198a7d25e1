"""Benchmark cases of the indexer: scan and selection of Flash, at a million tokens of context and at 64k."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase
from dsv4_kernels.indexer import index_slots
from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.peers import deep_gemm
from dsv4_kernels.quant import fake_quant_index

_HEADS, _DIM, _TOPK, _ROWS = 64, 128, 512, 64
_ROTATE_BYTES = 1 << 28  # over four times the L2
_ROW_BYTES = {"index_fp8": 132, "index_fp4": 68}
_CHUNK = 1 << 18  # rows encoded at once


def cases() -> list[KernelCase]:
    cases = [_case("index_fp8", num_seqs, 262144) for num_seqs in (1, 4, 16)]
    return [*cases, _case("index_fp8", 128, 16384), _case("index_fp4", 4, 262144)]


def _case(kind: Any, num_seqs: int, num_entries: int) -> KernelCase:
    moved = num_seqs * (num_entries * _ROW_BYTES[kind] + 2 * _HEADS * _DIM + 8 * _TOPK)
    fmt = RowFormat(kind, _DIM, 64, torch.bfloat16)
    columns = num_entries // _ROWS

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        sets = []
        for _ in range(max(2, _ROTATE_BYTES // moved)):
            pool = PagedRows.allocate(fmt, num_seqs * columns, _ROWS, device)
            for first in range(0, num_seqs * num_entries, _CHUNK):
                slots = torch.arange(first, min(first + _CHUNK, num_seqs * num_entries), device=device)
                pool.write(slots, randn(slots.shape[0], _DIM))
            table = torch.randperm(num_seqs * columns, generator=generator, device=device).view(num_seqs, columns)
            q = fake_quant_index(randn(num_seqs, _HEADS, _DIM).bfloat16(), kind.removeprefix("index_"))
            visible = torch.full((num_seqs,), num_entries, device=device)
            weights = randn(num_seqs, _HEADS) * (_HEADS * _DIM) ** -0.5
            sets.append((q, weights, pool, table, torch.arange(num_seqs, device=device), visible))
        return sets

    def run(inputs: tuple[Any, ...]) -> Any:
        q, weights, pool, table, seqs, visible = inputs
        return index_slots(q, weights, pool, table, seqs, visible, _TOPK)

    def in_triton(inputs: tuple[Any, ...]) -> Any:
        triton_impl = import_module("dsv4_kernels.indexer.triton_impl")  # Triton is optional where nothing is timed
        return triton_impl.index_slots(*inputs, _TOPK)

    def with_ring(inputs: tuple[Any, ...], ring: tuple[int, int]) -> Any:
        gluon_impl = import_module("dsv4_kernels.indexer.gluon_impl")
        return gluon_impl.index_slots(*inputs, _TOPK, ring=ring)

    variants: dict[str, Callable[[tuple[Any, ...]], Any]] = {"triton": in_triton}
    for ring in ((8, 3), (8, 2)):
        variants[f"ring of {ring[0]}, {ring[1]} programs"] = partial(with_ring, ring=ring)

    peers = {"deep_gemm scan": deep_gemm.scan_peer(), "deep_gemm": deep_gemm.select_peer(_TOPK)}
    shape = f"{num_seqs} sequences x {num_entries} keys in {kind.removeprefix('index_')}, top {_TOPK}"
    return KernelCase(
        name="indexer", shape=shape,
        make_inputs=make_inputs, run=run, bytes_moved=moved,
        flops=2.0 * num_seqs * num_entries * _HEADS * _DIM, roof="bandwidth", target_fraction=0.65,
        stretch_fraction=0.8, variants=variants,
        peers=peers if kind == "index_fp8" else {},
    )  # fmt: skip
