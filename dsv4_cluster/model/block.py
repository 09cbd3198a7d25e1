"""One decoder block: attention and experts, each between hyper-connections. Source: spec 4.1."""

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.attention import Attention
from dsv4_cluster.model.hyper_connection import add_hyper_connection, around
from dsv4_cluster.model.moe_layer import MoELayer
from dsv4_cluster.model.norm import RMSNorm
from dsv4_cluster.model.step_index import StepIndex
from dsv4_cluster.parallel.state import ParallelState


class Block(nn.Module):
    """A main layer, and the body of an MTP layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        parallel: ParallelState,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str,
        indexer_dtype: str,
    ) -> None:
        super().__init__()
        self._config = config
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device)
        self.attn = Attention(
            config,
            layer_id,
            parallel,
            dtype=dtype,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            indexer_dtype=indexer_dtype,
        )
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device)
        self.ffn = MoELayer(config, layer_id, parallel, dtype=dtype, device=device)
        add_hyper_connection(self, "hc_attn", config, device)
        add_hyper_connection(self, "hc_ffn", config, device)

    def run(self, x: torch.Tensor, index: StepIndex, cache: LayerCache) -> torch.Tensor:
        """x: [T, S, D] streams, whose memory may hold the result. Mutates `cache`. Returns: [T, S, D]."""
        input_ids = index.batch.input_ids
        x = around(self, "hc_attn", self._config, self.attn_norm, x, lambda y: self.attn(y, index, cache))
        return around(self, "hc_ffn", self._config, self.ffn_norm, x, lambda y: self.ffn(y, input_ids))
