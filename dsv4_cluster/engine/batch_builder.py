"""StepPlan -> ForwardBatch: ragged tensors, sequences back to back in plan order."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.engine.step import StepPlan
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.kv.page_table import page_table_rows
from dsv4_cluster.kv.views import LayerCache
from dsv4_cluster.model.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Row `row` of the batch predicts prompt position `position` of a sequence that wants prompt log-probabilities."""

    request_id: str
    row: int
    position: int


def build_batch(
    plan: StepPlan,
    sequences: Mapping[str, Sequence],
    kv_manager: KVManager,
    caches: tuple[LayerCache, ...],
    device: torch.device,
) -> ForwardBatch:
    """Assemble the step. `logits_rows` are the last rows of the chunks that sample, in plan order: the last token's
    and one per draft.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    token_to_seq: list[int] = []
    cu_seqlens_q = [0]
    logits_rows: list[int] = []
    for i, chunk in enumerate(plan.scheduled):
        input_ids += sequences[chunk.request_id].token_ids[chunk.start : chunk.end]
        input_ids += chunk.draft_token_ids
        positions += range(chunk.start, chunk.start + chunk.num_tokens)
        token_to_seq += [i] * chunk.num_tokens
        cu_seqlens_q.append(len(input_ids))
        if chunk.samples:
            logits_rows += range(len(input_ids) - 1 - chunk.num_drafts, len(input_ids))

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    request_ids = [chunk.request_id for chunk in plan.scheduled]
    slots = ints([kv_manager.slot(request_id) for request_id in request_ids])
    return ForwardBatch(
        input_ids=ints(input_ids),
        positions=ints(positions),
        token_to_seq=ints(token_to_seq),
        cu_seqlens_q=ints(cu_seqlens_q),
        seq_lens=ints([chunk.start + chunk.num_tokens for chunk in plan.scheduled]),
        page_table=page_table_rows([kv_manager.page_ids(request_id) for request_id in request_ids], device),
        window_slots=slots,
        state_slots=slots,
        logits_rows=ints(logits_rows),
        max_seqlen_q=max(chunk.num_tokens for chunk in plan.scheduled),
        caches=caches,
    )


def prompt_rows(plan: StepPlan, sequences: Mapping[str, Sequence]) -> list[PromptRow]:
    """Rows whose logits give prompt log-probabilities that are still missing."""
    rows: list[PromptRow] = []
    first_row = 0
    for chunk in plan.scheduled:
        sequence = sequences[chunk.request_id]
        if sequence.request.sampling.prompt_logprobs is not None:
            for position in range(chunk.start + 1, min(chunk.end + 1, sequence.num_prompt_tokens)):
                if position not in sequence.prompt_logprobs:
                    rows.append(PromptRow(chunk.request_id, first_row + position - 1 - chunk.start, position))
        first_row += chunk.num_tokens
    return rows
