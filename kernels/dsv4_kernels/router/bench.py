"""Benchmark cases of the router: one score layer of Flash."""

from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.router import route

_DIM, _EXPERTS, _TOPK, _VOCAB = 4096, 256, 6, 129280
_ROTATE_BYTES = 1 << 28  # over four times the L2


def cases() -> list[KernelCase]:
    return [
        _case(1, 8.0, 5.0, "microseconds"),
        _case(128, 10.0, 7.0, "microseconds"),
        _case(8192, 0.4, 0.6, "bandwidth"),
    ]


def _case(num_tokens: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    moved = 2 * (num_tokens + _EXPERTS) * _DIM + 8 * num_tokens * _TOPK

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[torch.Tensor, ...]]:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        bias = 0.1 * randn(_EXPERTS)
        ids = torch.randint(0, _VOCAB, (num_tokens,), generator=generator, device=device)
        return [
            (randn(num_tokens, _DIM).bfloat16(), (randn(_EXPERTS, _DIM) * _DIM**-0.5).bfloat16(), ids, bias)
            for _ in range(max(2, _ROTATE_BYTES // moved))
        ]

    def run(inputs: tuple[torch.Tensor, ...]) -> Any:
        x, weight, ids, bias = inputs
        return route(x, weight, ids, bias=bias, vocab_size=_VOCAB, topk=_TOPK, renormalise=True, scaling=1.5)

    return KernelCase(
        name="router", shape=f"{num_tokens} tokens, {_EXPERTS} experts x {_DIM}, top {_TOPK}", make_inputs=make_inputs,
        run=run, bytes_moved=moved, flops=2.0 * num_tokens * _EXPERTS * _DIM, roof=roof, target_fraction=target,
        stretch_fraction=stretch,
    )  # fmt: skip
