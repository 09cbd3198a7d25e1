"""Dispatch without communication: every rank has all tokens and computes its own experts' share of the sum."""

from itertools import pairwise

import torch

from dsv4_cluster.moe.base import Dispatched


class LocalDispatcher:
    """Implements ExpertDispatcher. With all experts on one rank it is exact; else the ranks' results are summed."""

    def __init__(self, experts: range) -> None:
        self._experts = experts

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Dispatched:
        num_tokens, topk = topk_ids.shape
        sorted_ids, pairs = topk_ids.flatten().sort(stable=True)
        bounds = torch.arange(self._experts.start, self._experts.stop + 1, device=x.device)
        # The product loops over experts with their row counts on the host: the one synchronisation of an MoE layer.
        ends = torch.searchsorted(sorted_ids, bounds).tolist()
        pairs = pairs[ends[0] : ends[-1]]
        return Dispatched(
            x=x.index_select(0, pairs // topk),
            weights=topk_weights.flatten().index_select(0, pairs),
            counts=[last - first for first, last in pairwise(ends)],
            pairs=pairs,
            num_tokens=num_tokens,
            topk=topk,
        )

    def combine(self, y: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        by_pair = y.new_zeros(dispatched.num_tokens * dispatched.topk, y.shape[1])
        by_pair.index_copy_(0, dispatched.pairs, y)
        return by_pair.view(dispatched.num_tokens, dispatched.topk, -1).sum(dim=1)  # in order of choice: repeatable
