"""Benchmark cases of the block-scaled FP8 product: the Flash model's matrices, rows that are quantised already."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4_kernels.bench_case import KernelCase, Roof
from dsv4_kernels.dispatch import implementation
from dsv4_kernels.gemm.fp8 import Fp8Weight, fp8_linear, make_fp8_weight
from dsv4_kernels.peers import deep_gemm
from dsv4_kernels.quant import Fp8Rows, quantise_fp8

_ROTATE_BYTES = 1 << 28  # over four times the L2
_LIBRARY_FP8 = 1300e12  # about what the library's product reaches on this chip; the targets are TFLOP/s


@dataclass(frozen=True, slots=True)
class Inputs:
    rows: Fp8Rows
    weight: Fp8Weight


def cases() -> list[KernelCase]:
    # (name, rows per group, columns, groups), with the fractions for weights of 16 MB and more, and of 6 MB
    large = [("wq_b", 32768, 1024, 1), ("wo_a", 1024, 4096, 8), ("wo_b", 4096, 8192, 1)]
    small = [("wq_a + wkv", 1536, 4096, 1)]
    decode = [_decode(*one, tokens, 0.75, 0.85) for one in large for tokens in (1, 32)]
    decode += [_decode(*one, tokens, 0.60, 0.75) for one in small for tokens in (1, 32)]
    return decode + [_prefill(*one, 8192) for one in large]


def _decode(
    name: str, num_rows: int, num_columns: int, groups: int, tokens: int, target: float, stretch: float
) -> KernelCase:
    stages = {f"stages {n}": _run("triton", {"stream_stages": n}) for n in (4, 5, 7)}
    return _case(name, num_rows, num_columns, groups, tokens, "bandwidth", target, stretch, stages)


def _prefill(name: str, num_rows: int, num_columns: int, groups: int, tokens: int) -> KernelCase:
    options = ((128, 64, 2, 4, 3), (128, 128, 2, 8, 3), (128, 128, 1, 8, 3), (64, 128, 1, 4, 3), (128, 64, 2, 8, 4))
    variants = {
        f"tile {a} x {b} x {c} warps {d} stages {e}": _run(
            "triton", {"tile_tokens": a, "tile_rows": b, "halves": c, "num_warps": d, "num_stages": e}
        )
        for a, b, c, d, e in options
    }
    variants["torch"] = _run("torch", {})
    target, stretch = 900e12 / _LIBRARY_FP8, 1100e12 / _LIBRARY_FP8
    return _case(name, num_rows, num_columns, groups, tokens, "fp8", target, stretch, variants)


def _case(
    name: str, num_rows: int, num_columns: int, groups: int, tokens: int, roof: Roof, target: float, stretch: float,
    variants: dict[str, Callable[[Inputs], torch.Tensor]],
) -> KernelCase:  # fmt: skip
    weight_bytes = groups * num_rows * num_columns

    def make_inputs(device: torch.device, generator: torch.Generator) -> list[Inputs]:
        return [_inputs(num_rows, num_columns, groups, tokens, device, generator)
                for _ in range(max(2, _ROTATE_BYTES // weight_bytes))]  # fmt: skip

    return KernelCase(
        name=f"gemm.fp8 {name}",
        shape=f"{tokens} tokens, {groups} x {num_rows} x {num_columns}",
        make_inputs=make_inputs,
        run=lambda inputs: fp8_linear(inputs.rows, inputs.weight, impl="triton"),
        bytes_moved=weight_bytes + tokens * groups * (num_columns + 2.0 * num_rows),
        flops=2.0 * tokens * weight_bytes,
        roof=roof,
        target_fraction=target,
        stretch_fraction=stretch,
        variants=variants,
        peers={"deep_gemm": deep_gemm.linear_peer()},
    )


def _inputs(
    num_rows: int, num_columns: int, groups: int, tokens: int, device: torch.device, generator: torch.Generator
) -> Inputs:
    x = torch.randn(tokens, groups * num_columns, generator=generator, device=device).bfloat16()
    shape = (groups * num_rows, num_columns)
    values = torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)
    blocks = (shape[0] // 128, num_columns // 128)
    scales = torch.randint(115, 122, blocks, generator=generator, device=device, dtype=torch.uint8)
    return Inputs(Fp8Rows(*quantise_fp8(x, 128)), make_fp8_weight(values, scales, num_groups=groups))


def _run(impl: str, options: dict[str, int]) -> Callable[[Inputs], torch.Tensor]:
    def run(inputs: Inputs) -> torch.Tensor:
        rows = inputs.rows
        module = implementation("gemm.fp8", rows.values.device, rows.values.dtype, impl)
        config = (module.Config(**options),) if options else ()
        out: torch.Tensor = module.fp8_linear(rows.values, rows.scales, inputs.weight, torch.bfloat16, *config)
        return out

    return run
