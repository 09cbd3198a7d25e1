"""Token embedding and language-model head, split over the vocabulary. Source: spec 2.4, 3.6, 7.1."""

import torch
from torch import nn
from torch.nn.functional import embedding

from dsv4_cluster.model.linear import Linear
from dsv4_cluster.parallel.collectives import all_gather, all_reduce
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.shard import ShardRule

_VOCABULARY_RULE = ShardRule(0, "tp")


class Embedding(nn.Module):
    """Rows of this rank's vocabulary range; other ids contribute zero before the sum over ranks."""

    def __init__(
        self, vocab_size: int, dim: int, parallel: ParallelState, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._first, last = _VOCABULARY_RULE.bounds(vocab_size, parallel.tp_rank, parallel.tp_size)
        weight = torch.empty(last - self._first, dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._parallel = parallel

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] int64. Returns: [T, D]."""
        if self._parallel.tp_size == 1:
            return embedding(input_ids, self.weight)
        local = input_ids - self._first
        owned = (local >= 0) & (local < self.weight.shape[0])
        rows = embedding(torch.where(owned, local, 0), self.weight)
        return all_reduce(rows * owned.unsqueeze(1), self._parallel, "tp")


class Head(Linear):
    """Logits in fp32, because bf16 logits would merge close candidates; the weight has the compute dtype."""

    def __init__(
        self, vocab_size: int, dim: int, parallel: ParallelState, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        first, last = _VOCABULARY_RULE.bounds(vocab_size, parallel.tp_rank, parallel.tp_size)
        super().__init__(dim, last - first, dtype=dtype, device=device, out_dtype=torch.float32)
        self._parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [R, D]. Returns: [R, V] fp32."""
        return all_gather(super().forward(x), self._parallel, "tp", dim=1)
