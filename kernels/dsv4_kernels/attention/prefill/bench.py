"""Benchmark cases of prefill attention: chunks of CSA layers in both formats of the cache, and a long HCA layer."""

from functools import partial
from typing import Any, Literal

import torch

from dsv4_kernels.attention.decode.bench import STEPS
from dsv4_kernels.attention.keys import Ending
from dsv4_kernels.attention.prefill import PoolKeys, WindowKeys, prefill_attention, prefill_attention_fp8, triton_impl
from dsv4_kernels.attention.triton_core import Step
from dsv4_kernels.bench_case import KernelCase
from dsv4_kernels.kv.rows import PagedRows, RowFormat
from dsv4_kernels.peers import flash_mla

_WINDOW, _ENTRIES_PER_PAGE, _HEADS, _DIM, _ROPE = 128, 64, 64, 512, 64
_BF16_ROOF = 762e12  # measured with the library's product
_TARGET, _STRETCH = 400e12 / _BF16_ROOF, 500e12 / _BF16_ROOF
_ROW_BYTES = {"kv_fp8": 584, "plain": 1024}
Kind = Literal["kv_fp8", "plain"]


def cases() -> list[KernelCase]:
    return [
        _case("CSA", 4096, 2048, 512, "kv_fp8"),
        _case("CSA", 4096, 2048, 512, "plain"),
        _case("HCA", 1024, 2048, 2048, "kv_fp8"),
    ]


def _case(name: str, num_tokens: int, num_entries: int, seen: int, kind: Kind) -> KernelCase:
    """seen: entries of one token; when these are all of them, the tokens share a list."""
    keys = _WINDOW + seen
    rows = num_entries * _ROW_BYTES[kind] + (num_tokens + _WINDOW) * _DIM * 2
    steps = STEPS if kind == "kv_fp8" else STEPS[:1]
    num_slots = seen if seen == num_entries else num_tokens * seen

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def one() -> tuple[Any, ...]:
            fmt = RowFormat(kind, _DIM, _ROPE, torch.bfloat16)
            pool = PagedRows.allocate(fmt, num_entries // _ENTRIES_PER_PAGE, _ENTRIES_PER_PAGE, device)
            pool.write(torch.arange(num_entries, device=device), randn(num_entries, _DIM))
            lists = 1 if seen == num_entries else num_tokens
            slots = torch.rand(lists, num_entries, generator=generator, device=device).argsort(1)[:, :seen]
            begin = torch.arange(num_tokens, device=device)
            window = WindowKeys(randn(num_tokens + _WINDOW, _DIM).bfloat16(), begin, begin + _WINDOW)
            angle = randn(num_tokens, _ROPE // 2)
            return (
                randn(num_tokens, _HEADS, _DIM).bfloat16(), window, PoolKeys(pool, slots.contiguous(), None),
                randn(_HEADS), torch.polar(torch.ones_like(angle), angle),
            )  # fmt: skip

        return [one() for _ in range(2)]

    def run(inputs: tuple[Any, ...]) -> torch.Tensor:
        q, window, entries, sink, cis = inputs
        return prefill_attention(q, window, entries, sink=sink, cis=cis, scale=_DIM**-0.5)

    def run_steps(step: Step, inputs: tuple[Any, ...]) -> torch.Tensor:
        q, window, entries, sink, cis = inputs
        return triton_impl.prefill_attention(q, window, entries, Ending(sink, cis, _DIM**-0.5), step)

    def run_fp8(inputs: tuple[Any, ...]) -> torch.Tensor:
        q, window, entries, sink, cis = inputs
        return prefill_attention_fp8(q, window, entries, sink=sink, cis=cis, scale=_DIM**-0.5).values

    return KernelCase(
        name=f"attention prefill {name}", shape=f"{num_tokens} tokens, {_HEADS} heads, {keys} keys, {kind}",
        make_inputs=make_inputs, run=run, bytes_moved=rows + 8 * num_slots + 4.0 * num_tokens * _HEADS * _DIM,
        flops=4.0 * num_tokens * _HEADS * keys * _DIM, roof="bf16", target_fraction=_TARGET, stretch_fraction=_STRETCH,
        variants={"to FP8 rows": run_fp8} | {f"{s.keys} keys, {s.stages} stages": partial(run_steps, s) for s in steps},
        peers={"flash_mla": flash_mla.prefill_peer()},
    )  # fmt: skip
