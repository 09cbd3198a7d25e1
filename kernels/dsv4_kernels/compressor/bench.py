"""Benchmark cases of a compressor's step: decode at random positions, and one prefill chunk."""

from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.compressor import CompressorBatch, CompressorPart, compress
from dsv4_kernels.compressor.step import num_sets
from dsv4_kernels.kv.rows import PagedRows, RowFormat

_ENTRY = RowFormat("kv_fp8", 512, 64, torch.bfloat16)
_KEY = RowFormat("index_fp8", 128, 64, torch.bfloat16)
_HEADROOM, _PAGE_TOKENS, _CONTEXT = 4, 256, 4096
_ROTATE_BYTES = 1 << 28  # over four times the L2
_MAX_SETS = 32


def cases() -> list[KernelCase]:
    return [
        _case(4, 128, 1, 10.0, 7.0, "microseconds"),
        _case(128, 128, 1, 10.0, 7.0, "microseconds"),
        _case(4, 1, 8192, 0.4, 0.6, "bandwidth"),
        _case(128, 1, 8192, 0.4, 0.6, "bandwidth"),
    ]


def _case(ratio: int, num_seqs: int, num_tokens: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    formats = [_ENTRY, _KEY] if ratio == num_sets(ratio) * 2 else [_ENTRY]
    total = num_seqs * num_tokens
    kept = num_seqs * min(num_tokens, num_sets(ratio) * ratio + _HEADROOM)
    row = sum(8 * num_sets(ratio) * fmt.dim for fmt in formats)  # kv and gate of a token
    old = total // ratio * row * ratio if num_tokens == 1 else 0  # blocks of decoding come from the rings
    moved = total * row + kept * row + old + total // ratio * 700

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        count = max(2, min(_MAX_SETS, _ROTATE_BYTES // moved))
        batch = _batch(ratio, num_seqs, num_tokens, device, generator)
        return [
            ([_part(fmt, ratio, total, num_seqs, device, generator) for fmt in formats], batch) for _ in range(count)
        ]

    return KernelCase(
        name=f"compressor {ratio}", shape=f"{num_seqs} sequences x {num_tokens} tokens, {len(formats)} parts",
        make_inputs=make_inputs, run=lambda inputs: compress(*inputs, ratio=ratio, eps=1e-6), bytes_moved=moved,
        flops=10.0 * total * row / 8, roof=roof, target_fraction=target, stretch_fraction=stretch,
    )  # fmt: skip


def _batch(
    ratio: int, num_seqs: int, num_tokens: int, device: torch.device, generator: torch.Generator
) -> CompressorBatch:
    first = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    if num_tokens == 1:
        first = torch.randint(ratio, _CONTEXT, (num_seqs,), generator=generator, device=device)
    steps = torch.arange(num_tokens, device=device)
    positions = (first[:, None] + steps).flatten()
    columns = max(_CONTEXT, num_tokens) // _PAGE_TOKENS
    angle = torch.rand(positions.shape[0], 32, generator=generator, device=device)
    return CompressorBatch(
        positions, torch.arange(num_seqs, device=device).repeat_interleave(num_tokens),
        torch.arange(num_seqs + 1, device=device) * num_tokens, torch.arange(num_seqs, device=device),
        torch.arange(num_seqs * columns, device=device).view(num_seqs, columns),
        torch.polar(torch.ones_like(angle), angle), num_tokens,
    )  # fmt: skip


def _part(
    fmt: RowFormat, ratio: int, total: int, num_seqs: int, device: torch.device, generator: torch.Generator
) -> CompressorPart:
    channels = num_sets(ratio) * fmt.dim

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    ring = PagedRows.allocate(RowFormat("plain", 2 * channels), num_seqs, num_sets(ratio) * ratio + _HEADROOM, device)
    num_pages = num_seqs * max(_CONTEXT, total // num_seqs) // _PAGE_TOKENS
    entries = PagedRows.allocate(fmt, num_pages, _PAGE_TOKENS // ratio, device)
    tokens = randn(total, 2 * channels)
    return CompressorPart(
        tokens[:, :channels], tokens[:, channels:], randn(ratio, channels), 1 + 0.1 * randn(fmt.dim), ring, entries
    )
