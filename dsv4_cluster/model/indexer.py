"""Lightning indexer: which compressed entries a query attends to. Source: spec 3.4, 4.5."""

from collections.abc import Mapping

import torch
from torch import nn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.compressor import Compressor
from dsv4_cluster.model.linear import Linear
from dsv4_cluster.model.step_index import StepIndex
from dsv4_kernels.indexer import hadamard, index_topk
from dsv4_kernels.quant import fake_quant_index
from dsv4_kernels.rope import apply_rope_


class Indexer(nn.Module):
    """Replicated on every rank, so that all ranks pick the same entries."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, indexer_dtype: str) -> None:
        super().__init__()
        num_heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, num_heads * dim, dtype=dtype, device=device)
        self.weights_proj = Linear(config.hidden_size, num_heads, dtype=dtype, device=device)
        # Rotating both sides leaves dot products unchanged; it pays off with FP4 only. Source: spec 3.4.
        self._is_rotated = indexer_dtype == "fp4"
        rotate = hadamard if self._is_rotated else None
        self.compressor = Compressor(config, 4, dim, dtype=dtype, device=device, rotate=rotate)
        self._indexer_dtype = indexer_dtype
        self._num_heads = num_heads
        self._weight_scale = dim**-0.5 * num_heads**-0.5
        self.topk = config.index_topk

    def forward(
        self, x: torch.Tensor, qr: torch.Tensor, index: StepIndex, cache: LayerCache
    ) -> Mapping[int, torch.Tensor]:
        """Write this step's keys, then select for the sequences that see more than `topk` entries.

        x: [T, D]. qr: [T, q_lora_rank]. Mutates the indexer pools of `cache`.
        Returns: per batch index of such a sequence, [num_tokens, topk] int64 entry ids, ascending, -1 = none
        behind them. The other sequences attend to all visible entries.
        """
        assert cache.indexer is not None and cache.indexer_state is not None, cache.ratio
        self.compressor(x, index, index.compress_plan(cache), cache.indexer_state, cache.indexer)
        spans = [span for span in index.spans if span.end // cache.ratio > self.topk]
        if not spans:
            return {}
        q, weights = self._queries(x, qr, index, cache.ratio)
        num_visible = index.num_visible(cache.ratio)
        selected = {}
        for span in spans:
            slots = index.span_entry_slots(span, cache.ratio, cache.indexer.rows_per_page)
            keys = cache.indexer.gather(slots)  # [end // ratio, dim]
            selected[span.seq] = index_topk(q[span.rows], keys, weights[span.rows], num_visible[span.rows], self.topk)
        return selected

    def _queries(
        self, x: torch.Tensor, qr: torch.Tensor, index: StepIndex, ratio: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, dim] as the cache would round them, and head weights [T, H] fp32 of any sign."""
        q = self.wq_b(qr).view(x.shape[0], self._num_heads, -1)
        apply_rope_(q, index.cis(ratio))
        if self._is_rotated:
            q = hadamard(q)
        weights = self.weights_proj(x).float() * self._weight_scale
        return fake_quant_index(q, self._indexer_dtype), weights
