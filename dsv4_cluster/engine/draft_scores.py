"""What the MTP layer would draft after every token of a given text, to measure acceptance without generating."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Self

import torch

from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.engine.batch_builder import build_batch
from dsv4_cluster.engine.loader import LoadedModel, check_mtp, load_mtp
from dsv4_cluster.engine.model_runner import LOGITS_TILE_BYTES, ModelRunner
from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.engine.step import ScheduledChunk, StepPlan
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.kv.page_table import num_pages_for
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.protocol.output import TokenLogprobs
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams
from dsv4_cluster.speculation.mtp_batch import MTPSpan, mtp_batch
from dsv4_cluster.weights.reader import Checkpoint

_ID = "scored"
_SLOT = 0


class DraftScorer:
    """Runs main model and MTP layer over texts, each in a cache of its own: the engine's pools are left alone."""

    def __init__(self, loaded: LoadedModel, mtp: MTPModule, kv: KVConfig, *, chunk_tokens: int) -> None:
        """chunk_tokens: tokens per pass."""
        self._loaded = loaded
        self._mtp = mtp
        self._runner = ModelRunner(loaded.model, vocab_size=loaded.config.vocab_size)
        dtype = loaded.layout.layers[0].window.dtype  # rows are gathered in the compute dtype
        self._layout = KVLayout.build(loaded.config, kv, dtype, num_mtp_layers=1, fingerprint="")
        self._chunk_tokens = chunk_tokens
        self._tile_rows = max(1, LOGITS_TILE_BYTES // (4 * loaded.config.vocab_size))

    @classmethod
    def open(cls, checkpoint_dir: str | Path, loaded: LoadedModel, kv: KVConfig, *, chunk_tokens: int) -> Self:
        """With the engine's MTP layer, or with one loaded for it. Raises: ConfigError without a usable MTP layer."""
        mtp = loaded.mtp
        if mtp is None:
            checkpoint = Checkpoint.open(checkpoint_dir)
            check_mtp(checkpoint, "draft log-probabilities were asked for")
            dtype = loaded.layout.layers[0].window.dtype
            mtp = load_mtp(checkpoint, kv, ParallelState(), dtype=dtype, device=loaded.device)
        return cls(loaded, mtp, kv, chunk_tokens=chunk_tokens)

    @torch.inference_mode()
    def score(self, token_ids: Seq[int], top: int) -> list[TokenLogprobs]:
        """The `top` most probable drafts of every row. token_ids: n >= 1 ids of the vocabulary.

        Returns: n - 1 entries; entry i is the distribution for position i + 2, from the main model's streams at
        position i and token i + 1.
        """
        pools = KVPools.allocate(self._layout, num_pages_for(len(token_ids)), 1, self._loaded.device)
        entries: list[TokenLogprobs] = []
        last_hidden: torch.Tensor | None = None
        for start, streams in self._main_chunks(token_ids, pools):
            end = start + streams.shape[0]
            hidden = streams if last_hidden is None else torch.cat((last_hidden, streams))
            first = end - hidden.shape[0]
            last_hidden = streams[-1:]
            if end - 1 > first:
                span = MTPSpan(_SLOT, first, list(token_ids[first + 1 : end]))
                batch = mtp_batch([span], pools.layer_caches, self._loaded.device)
                entries += self._top(self._mtp(batch, hidden[:-1], self._loaded.model), top)
        return entries

    def _main_chunks(self, token_ids: Seq[int], pools: KVPools) -> Iterator[tuple[int, torch.Tensor]]:
        """(position of the first row, final streams [n, S, D]) of one chunk after the other."""
        manager = KVManager(pools.num_pages, pools.num_slots)
        manager.allocate(_ID, len(token_ids))
        request = GenerationRequest(
            request_id=_ID, prompt_token_ids=tuple(token_ids), sampling=SamplingParams(max_tokens=1)
        )
        sequences = {_ID: Sequence(request, list(token_ids))}
        for start in range(0, len(token_ids), self._chunk_tokens):
            end = min(start + self._chunk_tokens, len(token_ids))
            plan = StepPlan(0, (ScheduledChunk(_ID, start, end, samples=False),))
            batch = build_batch(plan, sequences, manager, pools.layer_caches, self._loaded.device)
            yield start, self._runner.forward(batch)

    def _top(self, carries: torch.Tensor, top: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for tile in carries.split(self._tile_rows):
            logprobs = self._mtp.compute_logits(tile, self._loaded.model).log_softmax(dim=-1)
            values, ids = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
            entries += [
                dict(zip(row_ids, row, strict=True)) for row_ids, row in zip(ids.tolist(), values.tolist(), strict=True)
            ]
        return entries
