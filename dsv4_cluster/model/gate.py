"""Router: by score with a selection bias, or by the token-id table. Source: spec 4.7."""

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.model.linear import Linear
from dsv4_kernels.moe import route_by_hash, route_by_score


class Gate(Linear):
    """Logits are fp32: bf16 logits would route tokens differently. The weight is stored in bf16, so bf16 holds it."""

    def __init__(self, config: ModelConfig, layer_id: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(
            config.hidden_size, config.n_routed_experts, dtype=dtype, device=device, out_dtype=torch.float32
        )
        self._config = config
        num_experts = config.n_routed_experts
        self.tid2eid: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if config.is_hash_layer(layer_id):
            table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64, device=device)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.empty(num_experts, device=device), requires_grad=False)

    def route(self, x: torch.Tensor, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, D]; input_ids: [T] int64, of the same rows. Returns: ids [T, topk] int64; weights [T, topk] fp32."""
        config = self._config
        logits = self(x)  # [T, E]
        renormalise, scaling = config.norm_topk_prob, config.routed_scaling_factor
        if self.tid2eid is not None:
            return route_by_hash(logits, self.tid2eid[input_ids], renormalise=renormalise, scaling=scaling)
        assert self.bias is not None
        return route_by_score(logits, self.bias, config.num_experts_per_tok, renormalise=renormalise, scaling=scaling)
