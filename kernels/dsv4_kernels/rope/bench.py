"""Benchmark cases of norm and rotation: the queries of one layer."""

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.rope import norm_rope

_DIM, _PAIRS = 512, 32
_ROTATE_BYTES = 1 << 28  # over four times the L2


def cases() -> list[KernelCase]:
    return [_case(128, 32, 10.0, 6.0, "microseconds"), _case(8192, 64, 0.7, 0.85, "bandwidth")]


def _case(num_tokens: int, num_heads: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    num_bytes = num_tokens * num_heads * _DIM * 2

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = (num_tokens, num_heads, _DIM)
        angle = torch.rand(num_tokens, _PAIRS, generator=generator, device=device)
        cis = torch.polar(torch.ones_like(angle), angle)
        sets = max(2, _ROTATE_BYTES // (2 * num_bytes))
        return [(torch.randn(shape, generator=generator, device=device).bfloat16(), cis) for _ in range(sets)]

    def run(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return norm_rope(inputs[0], None, 1e-6, inputs[1])

    return KernelCase(
        name="rope q-norm", shape=f"{num_tokens} x {num_heads} x {_DIM} bf16", make_inputs=make_inputs, run=run,
        bytes_moved=2.0 * num_bytes, flops=4.0 * num_bytes, roof=roof, target_fraction=target, stretch_fraction=stretch,
    )  # fmt: skip
