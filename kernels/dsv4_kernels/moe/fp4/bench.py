"""Benchmark cases of the MXFP4 experts: the Flash shape, bf16 rows and routing in, summed rows out.

Two layers' experts (7 GB) take turns, so that no weight is in the L2 when it is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4_kernels.bench_case import KernelCase
from dsv4_kernels.dispatch import implementation
from dsv4_kernels.moe import build_work_list
from dsv4_kernels.moe.fp4 import Fp4Experts, fp4_experts, rows_per_tile
from dsv4_kernels.moe.fp4.inputs import random_experts, random_routing
from dsv4_kernels.moe.work_list import WorkList
from dsv4_kernels.peers import Peer, deep_gemm_experts, marlin

_HIDDEN, _INTERMEDIATE, _EXPERTS, _TOPK = 4096, 2048, 256, 6
_BYTES_PER_WEIGHT = 0.5 + 1 / 32
_LAYERS = 2
_TILES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Inputs:
    x: torch.Tensor  # [T, D] bf16
    ids: torch.Tensor
    weights: torch.Tensor
    experts: Fp4Experts
    works: dict[int, WorkList]  # by rows per tile


def cases() -> list[KernelCase]:
    decode = [(1, 0.45, 0.60), (8, 0.45, 0.60), (32, 0.65, 0.78), (128, 0.65, 0.78), (512, 0.65, 0.78)]
    # Targets are 600 and 800 TFLOP/s; the library's FP8 products reach about 1,300.
    return [_decode_case(*one) for one in decode] + [_prefill_case(8192, 600 / 1300, 800 / 1300)]


def _decode_case(num_tokens: int, target: float, stretch: float) -> KernelCase:
    distinct = _EXPERTS * (1 - (1 - _TOPK / _EXPERTS) ** num_tokens)  # expected under uniform routing
    weight_bytes = distinct * 3 * _HIDDEN * _INTERMEDIATE * _BYTES_PER_WEIGHT
    return KernelCase(
        name="moe.fp4 decode",
        shape=f"{num_tokens} tokens, {_EXPERTS} experts, top {_TOPK}, 4096 x 2048",
        make_inputs=lambda device, generator: _make_inputs(num_tokens, device, generator),
        run=_run_op,
        bytes_moved=weight_bytes + 4.0 * num_tokens * _HIDDEN,
        flops=_flops(num_tokens),
        roof="bandwidth",
        target_fraction=target,
        stretch_fraction=stretch,
        variants=_variants((16, 32) if num_tokens >= 128 else (16,), _DECODE_OPTIONS),
        peers=_peers(),
    )


def _prefill_case(num_tokens: int, target: float, stretch: float) -> KernelCase:
    return KernelCase(
        name="moe.fp4 prefill",
        shape=f"{num_tokens} tokens, {_EXPERTS} experts, top {_TOPK}, 4096 x 2048",
        make_inputs=lambda device, generator: _make_inputs(num_tokens, device, generator),
        run=_run_op,
        bytes_moved=_EXPERTS * 3 * _HIDDEN * _INTERMEDIATE * _BYTES_PER_WEIGHT,
        flops=_flops(num_tokens),
        roof="fp8",
        target_fraction=target,
        stretch_fraction=stretch,
        variants=_variants((32, 64), _PREFILL_OPTIONS),
        peers=_peers(),
    )


# Candidates of (gate-up warps, stages, down warps, stages, down halves, gate-up split), beside what `config_for` gives.
_DECODE_OPTIONS = ((4, 4, 4, 5), (4, 3, 4, 5), (4, 3, 4, 3), (4, 3, 4, 3, 2))
_PREFILL_OPTIONS = ((8, 3, 4, 3), (4, 3, 4, 3), (4, 3, 4, 3, 2, True), (8, 3, 8, 3, 2), (8, 4, 4, 4))


def _variants(
    tiles: tuple[int, ...], options: tuple[tuple[int, ...], ...]
) -> dict[str, Callable[[Inputs], torch.Tensor]]:
    named = ((tile, one) for tile in tiles for one in options)
    return {f"tile {tile} options {'/'.join(map(str, one))}": _run(tile, one) for tile, one in named}


def _peers() -> dict[str, Peer]:
    return {"marlin": marlin.experts_peer(), "deep_gemm": deep_gemm_experts.experts_peer()}


def _run_op(inputs: Inputs) -> torch.Tensor:
    """The work list is the router's and not timed."""
    work = inputs.works[rows_per_tile(inputs.x.shape[0], _TOPK, _EXPERTS)]
    return fp4_experts(inputs.x, inputs.ids, inputs.weights, inputs.experts, work=work, impl="triton")


def _run(tile: int, options: tuple[int, ...]) -> Callable[[Inputs], torch.Tensor]:
    def run(inputs: Inputs) -> torch.Tensor:
        module = implementation("moe.fp4", inputs.x.device, torch.float8_e4m3fn, "triton")
        out: torch.Tensor = module.fp4_experts(
            inputs.x, None, inputs.ids, inputs.weights, inputs.experts, 0, None, inputs.works[tile], torch.bfloat16,
            module.Config(*options),
        )  # fmt: skip
        return out

    return run


def _make_inputs(num_tokens: int, device: torch.device, generator: torch.Generator) -> list[Inputs]:
    layers = [random_experts(_EXPERTS, _HIDDEN, _INTERMEDIATE, generator) for _ in range(_LAYERS)]
    sets = []
    for experts in layers * (1 if num_tokens >= 32 else 4):  # few experts a token: other ones keep the L2 cold
        ids, weights = random_routing(num_tokens, _TOPK, _EXPERTS, generator)
        x = torch.randn(num_tokens, _HIDDEN, generator=generator, device=device).bfloat16()
        works = {tile: build_work_list(ids, num_experts=_EXPERTS, rows_per_tile=tile) for tile in _TILES}
        sets.append(Inputs(x, ids, weights, experts, works))
    return sets


def _flops(num_tokens: int) -> float:
    return 6.0 * num_tokens * _TOPK * _HIDDEN * _INTERMEDIATE
