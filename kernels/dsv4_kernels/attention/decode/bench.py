"""Benchmark cases of decode attention: a CSA layer at 4k context, and an HCA layer at 1M."""

from functools import partial
from typing import Any

import torch

from dsv4_kernels.attention.decode import triton_impl
from dsv4_kernels.attention.decode.op import decode_attention, decode_attention_fp8
from dsv4_kernels.attention.keys import Ending, PoolKeys
from dsv4_kernels.attention.triton_core import Step
from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.peers import flash_mla

_FORMAT = RowFormat("kv_fp8", 512, 64, torch.bfloat16)
_RING, _WINDOW, _ENTRIES_PER_PAGE, _HEADS = 136, 128, 64, 64
_ROW_BYTES = 584
_ROTATE_BYTES = 1 << 28  # over four times the L2
_MAX_SETS = 32
STEPS = (Step(32, 5), Step(64, 5))  # beside the default; for 64 bf16 rows the second has no room


def cases() -> list[KernelCase]:
    return [
        _case("CSA", 128, 1024, 512, 0.6, 0.8, "bf16"),
        _case("HCA", 1, 8192, 8192, 0.7, 0.85, "bandwidth"),
        _case("HCA", 16, 8192, 8192, 0.7, 0.85, "bf16"),
    ]


def _case(
    name: str, num_seqs: int, entries: int, selected: int, target: float, stretch: float, roof: Roof
) -> KernelCase:
    keys = _WINDOW + selected
    moved = num_seqs * (keys * (_ROW_BYTES + 8) + 2 * _HEADS * 512 * 2)

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def pool(num_rows: int, rows_per_page: int) -> PagedRows:
            made = PagedRows.allocate(_FORMAT, num_rows // rows_per_page, rows_per_page, device)
            made.write(torch.arange(num_rows, device=device), randn(num_rows, 512))
            return made

        def one() -> tuple[Any, ...]:
            sequence = torch.arange(num_seqs, device=device)[:, None]
            window = sequence * _RING + torch.arange(_WINDOW, device=device)
            order = torch.rand(num_seqs, entries, generator=generator, device=device).argsort(1)[:, :selected]
            angle = randn(num_seqs, 32)
            return (
                randn(num_seqs, _HEADS, 512).bfloat16(),
                [
                    PoolKeys(pool(num_seqs * _RING, _RING), window),
                    PoolKeys(pool(num_seqs * entries, _ENTRIES_PER_PAGE), sequence * entries + order),
                ],
                randn(_HEADS),
                torch.polar(torch.ones_like(angle), angle),
            )

        return [one() for _ in range(max(2, min(_MAX_SETS, _ROTATE_BYTES // moved)))]

    def run(inputs: tuple[Any, ...]) -> torch.Tensor:
        q, keys, sink, cis = inputs
        return decode_attention(q, keys, sink=sink, cis=cis, scale=512**-0.5)

    def run_steps(step: Step, inputs: tuple[Any, ...]) -> torch.Tensor:
        q, keys, sink, cis = inputs
        return triton_impl.decode_attention(q, keys, Ending(sink, cis, 512**-0.5), None, step)

    def run_fp8(inputs: tuple[Any, ...]) -> torch.Tensor:
        q, keys, sink, cis = inputs
        return decode_attention_fp8(q, keys, sink=sink, cis=cis, scale=512**-0.5).values

    return KernelCase(
        name=f"attention decode {name}", shape=f"{num_seqs} sequences, {_HEADS} heads, {keys} keys",
        make_inputs=make_inputs, run=run, bytes_moved=moved, flops=4.0 * num_seqs * _HEADS * keys * 512, roof=roof,
        target_fraction=target, stretch_fraction=stretch,
        variants={"to FP8 rows": run_fp8} | {f"{s.keys} keys, {s.stages} stages": partial(run_steps, s) for s in STEPS},
        peers={"flash_mla": flash_mla.decode_peer()},
    )  # fmt: skip
