"""The tensors of one step: ragged, sequences back to back, no padding on CPU."""

from dataclasses import dataclass

import torch

from dsv4_cluster.kv.views import LayerCache


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Input of one forward pass over T tokens of B sequences. Every sequence has at least one token."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute, consecutive within a sequence
    token_to_seq: torch.Tensor  # [T] int64, index into the batch
    cu_seqlens_q: torch.Tensor  # [B+1] int64, token range of each sequence
    seq_lens: torch.Tensor  # [B] int64, tokens in the cache after this step
    page_table: torch.Tensor  # [B, P] int64, page ids, -1 = none
    window_slots: torch.Tensor  # [B] int64, page of the window rings
    state_slots: torch.Tensor  # [B] int64, page of the state rings
    logits_rows: torch.Tensor  # [R] int64, rows of T whose logits are wanted
    max_seqlen_q: int
    caches: tuple[LayerCache, ...]  # one per layer
