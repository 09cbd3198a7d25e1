"""Benchmark cases of RMSNorm, alone and with the query latent quantised."""

from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.norm import rms_norm, rms_norm_fp8
from dsv4_kernels.quant import quantise_fp8

_EPS = 1e-6
_ROTATE_BYTES = 1 << 28  # over four times the L2
_LATENT = 1024  # columns of the query's latent; the 512 behind them are the key-value latent's


def cases() -> list[KernelCase]:
    return [
        _case(128, 4096, 5.0, 3.0, "microseconds"),
        _case(8192, 4096, 0.7, 0.85, "bandwidth"),
        _latent_case(128, 5.0, 3.0, "microseconds"),
        _latent_case(8192, 0.6, 0.8, "bandwidth"),
    ]


def _case(num_rows: int, dim: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    num_bytes = num_rows * dim * 2

    def run(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return rms_norm(*inputs, _EPS)

    return KernelCase(
        name="norm", shape=f"{num_rows} x {dim} bf16", make_inputs=_maker(num_rows, dim, dim), run=run,
        bytes_moved=2.0 * num_bytes, flops=4.0 * num_rows * dim, roof=roof, target_fraction=target,
        stretch_fraction=stretch,
    )  # fmt: skip


def _latent_case(num_rows: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    def run(inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return rms_norm_fp8(*inputs, _EPS)

    def two_launches(inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return quantise_fp8(rms_norm(*inputs, _EPS), 128)

    return KernelCase(
        name="norm q latent, FP8", shape=f"{num_rows} x {_LATENT} bf16", run=run,
        make_inputs=_maker(num_rows, _LATENT, _LATENT + 512), bytes_moved=num_rows * (3.0 * _LATENT + _LATENT / 128),
        flops=8.0 * num_rows * _LATENT, roof=roof, target_fraction=target, stretch_fraction=stretch,
        variants={"copied, normalised, quantised": two_launches},
    )  # fmt: skip


def _maker(num_rows: int, dim: int, width: int) -> Any:
    """Inputs of `dim` columns in rows of `width`."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        weight = torch.rand(dim, generator=generator, device=device)
        shape = (num_rows, width)
        sets = max(2, _ROTATE_BYTES // (2 * num_rows * dim * 2))
        return [
            (torch.randn(shape, generator=generator, device=device).bfloat16()[:, :dim], weight) for _ in range(sets)
        ]

    return make_inputs
