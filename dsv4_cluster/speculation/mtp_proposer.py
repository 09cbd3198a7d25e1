"""Chained drafts from the one MTP layer. Source: spec 5.3.

Pass 1 pairs the main model's streams of the last computed token with the token after it; pass j pairs the streams of
pass j - 1 with draft j - 1, one position further. Drafts are drawn with the noise that the main model will be sampled
with at their position: where both distributions are close, the same noise picks the same token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.sampling.batch import SamplingBatch, SamplingRow
from dsv4_cluster.sampling.sampler import sample_tokens
from dsv4_cluster.speculation.mtp_batch import MTPSpan, mtp_batch
from dsv4_cluster.speculation.proposer import DraftRow


class MTPProposer:
    """Drafts of a batch, one pass per depth. Its window rows are overwritten with true ones after verification."""

    def __init__(self, mtp: MTPModule, main: Transformer, caches: tuple[LayerCache, ...], device: torch.device) -> None:
        """caches: of the engine, the MTP layer's last; its hidden rows hold the last computed token of every row."""
        self._mtp = mtp
        self._main = main
        self._caches = caches
        self._device = device

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See `Proposer`. Mutates the MTP layer's window rows from the last computed position on."""
        drafts: list[list[int]] = [[] for _ in rows]
        active = list(range(len(rows)))
        streams = self._last_hidden(rows)  # [R, S, D]
        depth = 0
        while active:
            spans = [
                MTPSpan(rows[i].slot, len(rows[i].token_ids) - 2 + depth, [(drafts[i] or rows[i].token_ids)[-1]])
                for i in active
            ]
            for i in active:
                rows[i].prepare(drafts[i])
            streams = self._mtp(mtp_batch(spans, self._caches, self._device), streams, self._main)
            sampled, is_finite = self._sample(streams, [rows[i].sampling_row(drafts[i]) for i in active])
            going_on = []
            for row, i in enumerate(active):
                if is_finite[row]:
                    drafts[i].append(sampled[row])
                    if len(drafts[i]) < rows[i].num_drafts:
                        going_on.append(row)
            if len(going_on) < len(active):
                active = [active[row] for row in going_on]
                streams = streams[torch.tensor(going_on, dtype=torch.int64, device=self._device)]
            depth += 1
        return drafts

    def _last_hidden(self, rows: Sequence[DraftRow]) -> torch.Tensor:
        pool = self._caches[-1].hidden
        assert pool is not None, "the last layer is not an MTP layer"
        ring = pool.rows_per_page
        slots = [row.slot * ring + (len(row.token_ids) - 2) % ring for row in rows]
        hidden = pool.gather(torch.tensor(slots, dtype=torch.int64, device=self._device))  # [R, S * D]
        return hidden.view(len(rows), self._mtp.num_streams, -1)  # [R, S, D]

    def _sample(self, streams: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[bool]]:
        logits = self._mtp.compute_logits(streams, self._main)
        batch = SamplingBatch.build(rows, logits.device)
        sampled = sample_tokens(logits, replace(batch, num_logprobs=(None,) * len(rows)))
        return sampled.token_ids, sampled.is_finite
