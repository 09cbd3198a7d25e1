"""The seam between routing and the expert product: rows go to the ranks that hold their experts and come back."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows of this rank's experts, sorted by local expert."""

    x: torch.Tensor  # [N, D]
    weights: torch.Tensor  # [N] fp32
    counts: list[int]  # rows of each local expert, sum N
    pairs: torch.Tensor  # [N] int64, index of each row among the T * topk (token, choice) pairs
    num_tokens: int
    topk: int


class ExpertDispatcher(Protocol):
    """Moves rows to their experts and sums what comes back."""

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Dispatched:
        """Group rows by expert. x: [T, D]; topk_ids: [T, topk] int64, global; topk_weights: [T, topk] fp32."""
        ...

    def combine(self, y: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Sum the expert outputs of each token. y: [N, D] fp32, rows as dispatched. Returns: [T, D] fp32."""
        ...
