"""Random experts and routings for tests and benchmarks, made on the device in the packed layout."""

import torch

from dsv4_kernels.moe.fp4.layout import BLOCK_K, HALF_TILE, MAX_OFFSET, WORDS, Fp4Experts, PackedFp4

_UE8M0_ONE = 127
_WEIGHT_EXPONENT = -7  # of the largest group scales: weights of a few hundredths, as trained ones


def random_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, generator: torch.Generator, *, is_folded: bool = True,
    octaves: int = 3, limit: float = 10.0,
) -> Fp4Experts:  # fmt: skip
    """Uniform codes; group scales spread evenly over `octaves`, at most 12 when folded."""

    def matrix(num_rows: int, num_columns: int, rows_per_tile: int) -> PackedFp4:
        grid = (num_experts, num_rows // rows_per_tile, num_columns // BLOCK_K)
        device = generator.device
        words = torch.randint(
            -(1 << 31), 1 << 31, (*grid, rows_per_tile, WORDS), generator=generator, device=device, dtype=torch.int32
        )
        top = MAX_OFFSET if is_folded else _UE8M0_ONE + _WEIGHT_EXPONENT
        shape = (*grid, rows_per_tile, 4)
        groups = torch.randint(top - octaves + 1, top + 1, shape, generator=generator, device=device, dtype=torch.uint8)
        base = torch.randint(0, 2, grid, generator=generator, device=device, dtype=torch.int32) + _WEIGHT_EXPONENT - 6
        base = base << 23 if is_folded else torch.zeros_like(base)
        return PackedFp4(words, groups.view(torch.int32).squeeze(-1), base, is_folded)

    return Fp4Experts(
        matrix(2 * intermediate_size, hidden_size, 2 * HALF_TILE), matrix(hidden_size, intermediate_size, BLOCK_K),
        limit,
    )  # fmt: skip


def random_routing(
    num_tokens: int, topk: int, num_experts: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts per token, uniform. Returns: ids [T, topk] int32; weights [T, topk] fp32, sum 1."""
    scores = torch.rand(num_tokens, num_experts, generator=generator, device=generator.device)
    weights, ids = scores.topk(topk, dim=-1)
    return ids.int(), weights / weights.sum(-1, keepdim=True)
