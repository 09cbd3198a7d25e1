"""Benchmark cases of the window insert: the latent rows of one layer."""

from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.kv.op import insert
from dsv4_kernels.kv.rows import PagedRows, RowFormat

_FORMAT = RowFormat("kv_fp8", 512, 64, torch.bfloat16)
_RING, _PAIRS = 136, 32
_ROTATE_BYTES = 1 << 28  # over four times the L2
_MAX_SETS = 64


def cases() -> list[KernelCase]:
    return [_case(128, 10.0, 5.0, "microseconds"), _case(8192, 0.6, 0.8, "bandwidth")]


def _case(num_tokens: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    moved = num_tokens * (2 * 2 * _FORMAT.dim + 584 + 8 * _PAIRS + 8)

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        num_slots = -(-num_tokens // _RING) * _RING
        pool = PagedRows.allocate(_FORMAT, num_slots // _RING, _RING, device)
        angle = torch.rand(num_tokens, _PAIRS, generator=generator, device=device)
        cis = torch.polar(torch.ones_like(angle), angle)
        weight = torch.rand(_FORMAT.dim, generator=generator, device=device)
        slots = torch.randperm(num_slots, generator=generator, device=device)[:num_tokens]
        sets = max(2, min(_MAX_SETS, _ROTATE_BYTES // moved))
        shape = (num_tokens, _FORMAT.dim)
        rows = [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(sets)]
        return [(kv, weight, 1e-6, cis, pool, slots) for kv in rows]

    return KernelCase(
        name="kv insert", shape=f"{num_tokens} rows, norm, rope, fp8", make_inputs=make_inputs,
        run=lambda inputs: insert(*inputs), bytes_moved=moved, flops=20.0 * num_tokens * _FORMAT.dim, roof=roof,
        target_fraction=target, stretch_fraction=stretch,
    )  # fmt: skip
