"""Sequences to sampler rows. The one place that knows what a row depends on, with or without drafts in front of it."""

from collections.abc import Sequence as Seq

import torch

from dsv4_cluster.engine.sampling_state import SamplingState, Thoughts
from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.engine.stop import banned_token_ids
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.sampling.batch import SamplingRow
from dsv4_cluster.sampling.processors import LogitEdits


class SamplingRows:
    """Makes rows for sequences of one engine; knows the model's special tokens."""

    def __init__(self, *, eos_token_id: int, think_end_token_id: int | None, device: torch.device) -> None:
        self._eos_token_id = eos_token_id
        self._think_end_token_id = think_end_token_id
        self._device = device

    def row(
        self, sequence: Sequence, draft_token_ids: Seq[int] = (), *, allowed_mask: torch.Tensor | None = None
    ) -> SamplingRow:
        """The row that chooses the token after the sequence's tokens and these drafts.

        A draft is right exactly when it is what its row chooses: rows for drafts [:0], [:1], ..., [:k] verify k drafts
        and choose the token after them, each under the penalties, bans and thoughts its own past gives.
        allowed_mask: [W] int32, see SamplingRow; there is one only behind the thoughts, however they ended.
        """
        state = sequence.sampling_state
        if state is None:
            state = sequence.sampling_state = self._state(sequence.request)
        state.catch_up(sequence.token_ids)
        thoughts = state.thoughts
        if thoughts is not None and (allowed_mask is not None or not thoughts.is_open_after(draft_token_ids)):
            thoughts = None
        return SamplingRow(
            sequence.request.sampling,
            position=len(sequence.token_ids) + len(draft_token_ids),
            banned_token_ids=banned_token_ids(sequence, self._eos_token_id, num_drafts=len(draft_token_ids)),
            edits=state.edits,
            draft_token_ids=tuple(draft_token_ids),
            allowed_mask=allowed_mask,
            forced_token_id=None if thoughts is None else thoughts.forced_token_id(len(draft_token_ids)),
            replaced_token=None if thoughts is None else thoughts.replaced_token,
        )

    def _state(self, request: GenerationRequest) -> SamplingState:
        """The state of a sequence that has its prompt only; an imported one catches up with its first token."""
        return SamplingState(
            edits=LogitEdits.create(request.sampling, request.prompt_token_ids, self._device),
            thoughts=self._thoughts(request),
            num_seen=len(request.prompt_token_ids),
        )

    def _thoughts(self, request: GenerationRequest) -> Thoughts | None:
        """None unless something depends on where the thoughts end."""
        wants_answer = request.thinking_budget is not None or request.structured is not None
        if not request.thinking or not wants_answer or self._think_end_token_id is None:
            return None
        eos_token_id = None if request.stop.ignore_eos else self._eos_token_id
        return Thoughts(self._think_end_token_id, request.thinking_budget, eos_token_id)
