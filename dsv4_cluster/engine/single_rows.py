"""A batch as passes of one row each: what computes a row then depends on nothing but the row.

With one row per pass every shape follows from the row's own position, whatever else is in the batch and however its
prompt was cut. Rows run in order, so that a row finds the cache rows of those before it, as in one pass.
"""

from collections.abc import Iterator

import torch

from dsv4_cluster.model.forward_batch import ForwardBatch


def single_rows(batch: ForwardBatch) -> Iterator[ForwardBatch]:
    """One batch of one token per row of `batch`, in order."""
    zero = batch.token_to_seq.new_zeros(1)
    bounds = torch.tensor([0, 1], dtype=torch.int64, device=zero.device)
    for row, seq in enumerate(batch.token_to_seq.tolist()):
        this, owner = slice(row, row + 1), slice(seq, seq + 1)
        yield ForwardBatch(
            input_ids=batch.input_ids[this],
            positions=batch.positions[this],
            token_to_seq=zero,
            cu_seqlens_q=bounds,
            seq_lens=batch.positions[this] + 1,
            page_table=batch.page_table[owner],
            window_slots=batch.window_slots[owner],
            state_slots=batch.state_slots[owner],
            logits_rows=zero,
            max_seqlen_q=1,
            caches=batch.caches,
        )
