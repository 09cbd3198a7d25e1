"""Feed-forward of every layer: routed experts plus the shared expert. Source: spec 4.7."""

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.model.gate import Gate
from dsv4_cluster.model.linear import Linear
from dsv4_cluster.moe.base import ExpertDispatcher
from dsv4_cluster.moe.experts import Experts
from dsv4_cluster.moe.local import LocalDispatcher
from dsv4_cluster.moe.placement import local_experts
from dsv4_cluster.parallel.collectives import all_reduce
from dsv4_cluster.parallel.state import ParallelState
from dsv4_kernels.gemm import PackedExperts, pack_experts, packed_experts, shared_expert
from dsv4_kernels.moe import swiglu

_TILE_ROWS = 128  # per expert on average; the C kernels unpack a weight once per 48 of them


def expert_tile_tokens(config: ModelConfig) -> int:
    """Tokens that pass the experts together. A tile keeps one row per token and choice in three widths."""
    return -(-_TILE_ROWS * config.n_routed_experts // config.num_experts_per_tok)


class SharedExpert(nn.Module):
    """The expert every token passes; replicated, with the same clamps, no routing weight and no scaling."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inter = config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
        self.w1 = Linear(hidden, inter, dtype=dtype, device=device)
        self.w2 = Linear(inter, hidden, dtype=dtype, device=device)
        self.w3 = Linear(hidden, inter, dtype=dtype, device=device)
        self._limit = config.swiglu_limit
        self.packed: PackedExperts | None = None

    def pack(self) -> None:
        """As `Experts.pack`; call it instead of packing the three layers."""
        w1, w2, w3 = (layer.weight for layer in (self.w1, self.w2, self.w3))
        self.packed = pack_experts(w1.unsqueeze(0), w2.unsqueeze(0), w3.unsqueeze(0), self._limit)
        if self.packed is not None:
            for weight, matrix in zip((w1, w2, w3), self.packed.matrices, strict=True):
                weight.data = matrix.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, D]. Returns: [T, D] of x's dtype, fp32 when packed."""
        if self.packed is not None:
            return shared_expert(x, self.packed)
        return self.w2(swiglu(self.w1(x), self.w3(x), self._limit).to(x.dtype))  # type: ignore[no-any-return]


class MoELayer(nn.Module):
    """Experts are split over the ep axis; the routed sum stays fp32 until the shared output is added."""

    def __init__(
        self, config: ModelConfig, layer_id: int, parallel: ParallelState, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        experts = local_experts(config.n_routed_experts, parallel)
        self.gate = Gate(config, layer_id, dtype=dtype, device=device)
        self.experts = Experts(
            len(experts), config.hidden_size, config.moe_intermediate_size, config.swiglu_limit,
            dtype=dtype, device=device,
        )  # fmt: skip
        self.shared_experts = SharedExpert(config, dtype=dtype, device=device)
        self._dispatcher: ExpertDispatcher = LocalDispatcher(experts)
        self._first_expert = experts.start
        self._tile_tokens = expert_tile_tokens(config)
        self._parallel = parallel

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """x: [T, D]; input_ids: [T] int64, of the same rows. Returns: [T, D]."""
        topk_ids, topk_weights = self.gate.route(x, input_ids)
        if x.shape[0] <= self._tile_tokens:
            return self._forward_tile(x, topk_ids, topk_weights)
        out = torch.empty_like(x)
        for first in range(0, x.shape[0], self._tile_tokens):
            rows = slice(first, first + self._tile_tokens)
            out[rows] = self._forward_tile(x[rows], topk_ids[rows], topk_weights[rows])
        return out

    def _forward_tile(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        if self.experts.packed is not None:
            return self._forward_packed(x, topk_ids, topk_weights, self.experts.packed)
        dispatched = self._dispatcher.dispatch(x, topk_ids, topk_weights)
        routed = self._dispatcher.combine(self.experts(dispatched), dispatched)  # [T, D] fp32
        routed = all_reduce(routed, self._parallel, "ep")
        return (routed + self.shared_experts(x)).to(x.dtype)

    def _forward_packed(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: PackedExperts
    ) -> torch.Tensor:
        """The same with the CPU kernels; the shared output joins the fp32 sum."""
        is_alone = self._parallel.ep_size == 1
        routed = packed_experts(
            x,
            topk_ids,
            topk_weights,
            experts,
            first_expert=self._first_expert,
            shared=self.shared_experts.packed if is_alone else None,
            out_dtype=x.dtype if is_alone else torch.float32,
        )
        if is_alone and self.shared_experts.packed is not None:
            return routed
        return (all_reduce(routed, self._parallel, "ep") + self.shared_experts(x)).to(x.dtype)
