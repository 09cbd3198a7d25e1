"""MTP draft layer: one window-only block that predicts the token after next. Source: spec 5."""

import torch

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.model.block import Block
from dsv4_cluster.model.forward_batch import ForwardBatch
from dsv4_cluster.model.hyper_connection import add_hyper_connection, collapse, mix_in
from dsv4_cluster.model.linear import Linear
from dsv4_cluster.model.norm import RMSNorm
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.parallel.state import ParallelState


class MTPModule(Block):
    """Row i pairs the main model's streams at position i with the embedding of token i + 1, at position i.

    Parameters carry the names below `mtp.0.`; embedding and head are those of the main model.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str,
    ) -> None:
        super().__init__(
            config,
            config.num_hidden_layers,
            parallel,
            dtype=dtype,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            indexer_dtype="auto",  # a window-only layer has no indexer
        )
        hidden = config.hidden_size
        self.e_proj = Linear(hidden, hidden, dtype=dtype, device=device)
        self.h_proj = Linear(hidden, hidden, dtype=dtype, device=device)
        self.enorm = RMSNorm(hidden, config.rms_norm_eps, device=device)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps, device=device)
        self.norm = RMSNorm(hidden, config.rms_norm_eps, device=device)
        add_hyper_connection(self, "hc_head", config, device, is_head=True)
        self._layer_id = config.num_hidden_layers
        self.num_streams = config.hc_mult

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor, main: Transformer) -> torch.Tensor:
        """Run the layer and write its window rows.

        batch: `input_ids` holds the token after each row, `positions` the row's own; `caches` as for the main model
        with the MTP layers' at the end. hidden: [T, S, D], streams of the main model before hc_head, or the carry of
        the previous draft. Returns: [T, S, D], the carry.
        """
        return self.run(self._input(batch, hidden, main), main.step_index(batch), batch.caches[self._layer_id])

    def store_rows(self, batch: ForwardBatch, hidden: torch.Tensor, main: Transformer) -> None:
        """Only write the window rows, as `forward` would. They depend on nothing but their own streams and tokens."""
        y = mix_in(self, "hc_attn", self._config, self.attn_norm, self._input(batch, hidden, main))  # [T, D]
        self.attn.store_window(y, main.step_index(batch), batch.caches[self._layer_id])

    def compute_logits(self, x: torch.Tensor, main: Transformer) -> torch.Tensor:
        """x: [R, S, D] carries of the wanted rows. Returns: [R, V] fp32."""
        return main.head(collapse(self, self._config, self.norm, x))  # type: ignore[no-any-return]

    def _input(self, batch: ForwardBatch, hidden: torch.Tensor, main: Transformer) -> torch.Tensor:
        e = self.e_proj(self.enorm(main.embed(batch.input_ids)))  # [T, D]
        return self.h_proj(self.hnorm(hidden)) + e.unsqueeze(1)  # type: ignore[no-any-return]  # [T, S, D]
