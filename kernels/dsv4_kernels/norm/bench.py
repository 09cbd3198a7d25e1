"""Benchmark cases of RMSNorm."""

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.norm import rms_norm

_EPS = 1e-6
_ROTATE_BYTES = 1 << 28  # over four times the L2


def cases() -> list[KernelCase]:
    return [_case(128, 4096, 5.0, 3.0, "microseconds"), _case(8192, 4096, 0.7, 0.85, "bandwidth")]


def _case(num_rows: int, dim: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    num_bytes = num_rows * dim * 2

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        weight = torch.rand(dim, generator=generator, device=device)
        sets = max(2, _ROTATE_BYTES // (2 * num_bytes))
        shape = (num_rows, dim)
        return [(torch.randn(shape, generator=generator, device=device).bfloat16(), weight) for _ in range(sets)]

    def run(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return rms_norm(*inputs, _EPS)

    return KernelCase(
        name="norm", shape=f"{num_rows} x {dim} bf16", make_inputs=make_inputs, run=run, bytes_moved=2.0 * num_bytes,
        flops=4.0 * num_rows * dim, roof=roof, target_fraction=target, stretch_fraction=stretch,
    )  # fmt: skip
