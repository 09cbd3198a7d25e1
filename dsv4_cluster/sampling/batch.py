"""The sampling parameters of one step as tensors, one row per token to choose."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_cluster.protocol.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one sequence asks of the sampler at this step."""

    params: SamplingParams
    position: int  # index in the sequence of the token being chosen
    banned_token_ids: tuple[int, ...] = ()  # stop tokens while min_tokens is not reached


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Device tensors for R rows."""

    temperature: torch.Tensor  # [R] fp32
    top_p: torch.Tensor  # [R] fp32
    seeds: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64
    banned_rows: torch.Tensor  # [N] int64
    banned_ids: torch.Tensor  # [N] int64, token id banned in the row of the same index
    num_logprobs: tuple[int | None, ...]  # per row

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> "SamplingBatch":
        """Gather `rows` into tensors on `device`."""
        banned = [(i, token_id) for i, row in enumerate(rows) for token_id in row.banned_token_ids]

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def floats(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            temperature=floats([row.params.temperature for row in rows]),
            top_p=floats([row.params.top_p for row in rows]),
            seeds=ints([row.params.seed for row in rows]),
            positions=ints([row.position for row in rows]),
            banned_rows=ints([row for row, _ in banned]),
            banned_ids=ints([token_id for _, token_id in banned]),
            num_logprobs=tuple(row.params.logprobs for row in rows),
        )
