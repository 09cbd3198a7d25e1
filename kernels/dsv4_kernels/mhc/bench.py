"""Benchmark cases of the hyper-connections: the end of one sub-layer and the beginning of the next."""

from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase
from dsv4_kernels.mhc import hc_post_pre
from dsv4_kernels.peers import deep_gemm

_DIM = 4096  # Flash
_STREAMS, _MIXES = 4, 24
_L2_BYTES = 60 << 20
_EPS = 1e-6


def cases() -> list[KernelCase]:
    return [
        _case(1, "microseconds", 8.0, 5.0),
        _case(128, "microseconds", 16.0, 12.0),
        _case(8192, "bandwidth", 0.65, 0.80),
    ]


def _case(num_tokens: int, roof: Any, target: float, stretch: float) -> KernelCase:
    streams = num_tokens * _STREAMS * _DIM * 2
    # streams in and out, sub-layer output in, next input out in bf16 and FP8, fn
    moved = 2 * streams + num_tokens * _DIM * 5 + _MIXES * _STREAMS * _DIM * 4

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[Any]:
        return [_inputs(num_tokens, device, generator) for _ in range(min(64, _L2_BYTES // moved + 2))]

    return KernelCase(
        name="mhc post+pre",
        shape=f"{num_tokens} tokens, {_STREAMS} x {_DIM}, 20 Sinkhorn iterations, norm and FP8 rows",
        make_inputs=make_inputs,
        run=lambda inputs: hc_post_pre(
            *inputs[:-1], num_iters=20, eps=_EPS, norm_eps=_EPS, norm_weight=inputs[-1], quantise=True
        ),
        bytes_moved=moved,
        flops=2.0 * num_tokens * _MIXES * _STREAMS * _DIM,
        roof=roof,
        target_fraction=target,
        stretch_fraction=stretch,
        peers={"deep_gemm product": deep_gemm.mix_peer(norm_eps=_EPS)},
    )


def _inputs(num_tokens: int, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    y, x = randn(num_tokens, _DIM).bfloat16(), randn(num_tokens, _STREAMS, _DIM).bfloat16()
    post, comb = 2 * randn(num_tokens, _STREAMS).sigmoid(), randn(num_tokens, _STREAMS, _STREAMS).softmax(1)
    fn = randn(_MIXES, _STREAMS * _DIM) * (_STREAMS * _DIM) ** -0.5
    return y, x, post, comb, fn, randn(3), randn(_MIXES), 1 + 0.1 * randn(_DIM)
