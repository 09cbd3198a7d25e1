"""The main model: embedding, four residual streams through all blocks, head. Source: spec 4.1."""

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.model.block import Block
from dsv4_cluster.model.embedding import Embedding, Head
from dsv4_cluster.model.forward_batch import ForwardBatch
from dsv4_cluster.model.hyper_connection import add_hyper_connection, collapse
from dsv4_cluster.model.norm import RMSNorm
from dsv4_cluster.model.rope import rope_frequencies
from dsv4_cluster.model.step_index import StepIndex
from dsv4_cluster.parallel.state import ParallelState


class Transformer(nn.Module):
    """Parameters carry the official checkpoint names. Weights are undefined until `weight_map.load_weights`."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str,
        indexer_dtype: str,
    ) -> None:
        """dtype: compute dtype. kv_cache_dtype, indexer_dtype: as the pools of the batches were laid out.

        Raises: ConfigError when the split does not divide the model.
        """
        super().__init__()
        self._config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, parallel, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            Block(
                config,
                layer_id,
                parallel,
                dtype=dtype,
                device=device,
                kv_cache_dtype=kv_cache_dtype,
                indexer_dtype=indexer_dtype,
            )
            for layer_id in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device)
        self.head = Head(config.vocab_size, config.hidden_size, parallel, dtype=dtype, device=device)
        add_hyper_connection(self, "hc_head", config, device, is_head=True)
        self._plain = rope_frequencies(config, 0, device)
        self._compressed = rope_frequencies(config, 4, device)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run all blocks and write the caches of `batch`. Returns: [T, S, D], the streams before hc_head."""
        index = self.step_index(batch)
        x = self.embed(batch.input_ids).unsqueeze(1).repeat(1, self._config.hc_mult, 1)  # [T, S, D]
        for layer, cache in zip(self.layers, batch.caches, strict=False):  # MTP layers own the caches at the end
            assert isinstance(layer, Block)
            x = layer.run(x, index, cache)
        return x

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: [R, S, D] streams of the wanted rows. Returns: [R, V] fp32."""
        return self.head(collapse(self, self._config, self.norm, x))  # type: ignore[no-any-return]

    def step_index(self, batch: ForwardBatch) -> StepIndex:
        """Index tensors that all layers of a step share."""
        return StepIndex(
            batch,
            window=self._config.sliding_window,
            plain=self._plain,
            compressed=self._compressed,
            window_ring=batch.caches[0].window.rows_per_page,
        )
