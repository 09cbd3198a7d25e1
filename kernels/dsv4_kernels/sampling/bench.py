"""Benchmark cases of sampling: 128 rows of Flash's vocabulary, by what the rows ask for."""

from typing import Any

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.sampling.op import sample, token_logprobs

_VOCAB = 129280
_ROWS = 128  # their logits are 66 MB: reading them once takes 15 us
_TEMPERATURE, _TOP_P, _TOP_K = 0.8, 0.95, 50
_TOP = 5


def cases() -> list[KernelCase]:
    return [
        _case("greedy", 1, 10.0, 6.0, "microseconds"),
        _case("greedy", _ROWS, 0.5, 0.75, "bandwidth"),
        _case("temperature", 1, 15.0, 10.0, "microseconds"),
        _case("temperature", _ROWS, 0.25, 0.5, "bandwidth"),
        _case("top_p", 1, 80.0, 40.0, "microseconds"),
        _case("top_k, top_p", _ROWS, 0.05, 0.2, "bandwidth"),
        _case("logprobs", _ROWS, 0.2, 0.5, "bandwidth"),
    ]


def _case(way: str, num_rows: int, target: float, stretch: float, roof: Roof) -> KernelCase:
    num_bytes = num_rows * _VOCAB * 4

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[tuple[Any, ...]]:
        def filled(value: float) -> torch.Tensor:
            return torch.full((num_rows,), value, device=device)

        index = torch.arange(num_rows, device=device)
        heat = filled(0.0 if way == "greedy" else _TEMPERATURE)
        top_p = filled(_TOP_P if "top_p" in way else 1.0)
        top_k = index * 0 + (_TOP_K if "top_k" in way else 0)
        shape = (num_rows, _VOCAB)
        sets = max(2, min(128, (1 << 28) // num_bytes))
        logits = [4 * torch.randn(shape, generator=generator, device=device) for _ in range(sets)]
        return [(one, heat, top_p, index, index, top_k) for one in logits]

    def run(inputs: tuple[Any, ...]) -> Any:
        logits, heat, top_p, seeds, positions, top_k = inputs
        if way == "logprobs":
            return token_logprobs(logits, seeds, _TOP)
        return sample(logits, heat, top_p, seeds, positions, top_k=top_k)

    return KernelCase(
        name="sampling", shape=f"{num_rows} x {_VOCAB}, {way}", make_inputs=make_inputs, run=run,
        bytes_moved=num_bytes, flops=10.0 * num_rows * _VOCAB, roof=roof, target_fraction=target,
        stretch_fraction=stretch,
    )  # fmt: skip
