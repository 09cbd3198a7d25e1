"""Drive a Transformer chunk by chunk with real pools, pages and slots, without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.kv.layout import KVLayout
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.model.forward_batch import ForwardBatch
from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.model.weight_map import load_weights
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.reader import Checkpoint

CPU = torch.device("cpu")


@dataclass(slots=True)
class LiveSequence:
    """A sequence between steps."""

    slot: int
    pages: list[int]
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    indexer_dtype: Literal["auto", "fp8", "fp4"] = "auto",
) -> Transformer:
    """A one-rank model with the weights of a checkpoint."""
    parallel = ParallelState()
    model = Transformer(
        checkpoint.config,
        parallel,
        dtype=dtype,
        device=CPU,
        kv_cache_dtype=kv_cache_dtype,
        indexer_dtype=indexer_dtype,
    )
    load_weights(model, checkpoint, parallel)
    return model


class Harness:
    """Pools plus the bookkeeping of who owns what; pages are handed out in scattered order."""

    def __init__(
        self,
        model: Transformer,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        kv: KVConfig | None = None,
        num_pages: int = 16,
        num_slots: int = 8,
        num_mtp_layers: int = 0,
    ) -> None:
        self.model = model
        layout = KVLayout.build(config, kv or KVConfig(), dtype, num_mtp_layers=num_mtp_layers, fingerprint="test")
        self.pools = KVPools.allocate(layout, num_pages, num_slots, CPU)
        self._free_pages = list(range(num_pages))[::-1]
        self._free_slots = list(range(num_slots))[::-1]

    def start(self, num_tokens: int) -> LiveSequence:
        """A sequence with room for `num_tokens`."""
        pages = [self._free_pages.pop() for _ in range(-(-num_tokens // PAGE_TOKENS))]
        return LiveSequence(self._free_slots.pop(), pages)

    def finish(self, sequence: LiveSequence) -> None:
        """Give pages and slot back; their contents stay, as in the engine."""
        self._free_pages += sequence.pages
        self._free_slots.append(sequence.slot)

    def batch(self, work: Sequence[tuple[LiveSequence, list[int]]]) -> ForwardBatch:
        """The batch that appends the given tokens to the given sequences."""
        ids, positions, owners, bounds = [], [], [], [0]
        for i, (sequence, tokens) in enumerate(work):
            ids += tokens
            positions += range(sequence.num_computed, sequence.num_computed + len(tokens))
            owners += [i] * len(tokens)
            bounds.append(len(ids))
        widest = max(len(sequence.pages) for sequence, _ in work)
        table = [sequence.pages + [-1] * (widest - len(sequence.pages)) for sequence, _ in work]
        slots = torch.tensor([sequence.slot for sequence, _ in work])
        return ForwardBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            token_to_seq=torch.tensor(owners),
            cu_seqlens_q=torch.tensor(bounds),
            seq_lens=torch.tensor([sequence.num_computed + len(tokens) for sequence, tokens in work]),
            page_table=torch.tensor(table),
            window_slots=slots,
            state_slots=slots,
            logits_rows=torch.arange(len(ids)),
            max_seqlen_q=max(len(tokens) for _, tokens in work),
            caches=self.pools.layer_caches,
        )

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[LiveSequence, list[int]]]) -> list[torch.Tensor]:
        """Append tokens. Returns: per sequence the log-probabilities after each of them, [n, V] fp32."""
        batch = self.batch(work)
        logprobs = self.model.compute_logits(self.model(batch)).log_softmax(-1)
        for sequence, tokens in work:
            sequence.token_ids += tokens
            sequence.num_computed += len(tokens)
        return list(logprobs.split([len(tokens) for _, tokens in work]))

    def logprobs(self, token_ids: list[int], cuts: Sequence[int] = ()) -> torch.Tensor:
        """One sequence alone, in chunks of the given lengths, the last one repeated to the end. Returns: [T, V]."""
        sequence = self.start(len(token_ids))
        parts, done, remaining = [], 0, list(cuts) or [len(token_ids)]
        while done < len(token_ids):
            size = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            parts += self.step([(sequence, token_ids[done : done + size])])
            done += size
        self.finish(sequence)
        return torch.cat(parts)
