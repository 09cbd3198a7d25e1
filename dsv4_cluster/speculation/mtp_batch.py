"""The batch of an MTP pass: rows of window-only layers, so rings are all it addresses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class MTPSpan:
    """Consecutive MTP rows of one sequence."""

    slot: int  # of the sequence's rings
    start: int  # position of the first row
    next_token_ids: Sequence[int]  # entry i: the token at position start + i + 1


def mtp_batch(spans: Sequence[MTPSpan], caches: tuple[LayerCache, ...], device: torch.device) -> ForwardBatch:
    """Assemble spans back to back; `logits_rows` are all rows."""
    input_ids: list[int] = []
    positions: list[int] = []
    token_to_seq: list[int] = []
    cu_seqlens = [0]
    for i, span in enumerate(spans):
        num_rows = len(span.next_token_ids)
        input_ids += span.next_token_ids
        positions += range(span.start, span.start + num_rows)
        token_to_seq += [i] * num_rows
        cu_seqlens.append(len(input_ids))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = ints([span.slot for span in spans])
    return ForwardBatch(
        input_ids=ints(input_ids),
        positions=ints(positions),
        token_to_seq=ints(token_to_seq),
        cu_seqlens_q=ints(cu_seqlens),
        seq_lens=ints([span.start + len(span.next_token_ids) for span in spans]),
        page_table=torch.full((len(spans), 0), -1, dtype=torch.int64, device=device),
        window_slots=slots,
        state_slots=slots,
        logits_rows=torch.arange(len(input_ids), device=device),
        max_seqlen_q=max(len(span.next_token_ids) for span in spans),
        caches=caches,
    )
