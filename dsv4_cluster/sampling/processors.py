"""What one sequence changes on its own logits: bias and penalties, kept as tensors that grow by a step per token.

A step then costs the sequence a few tensor slices, whatever the length of its text, of its prompt or of its bias list.
"""

from collections.abc import Sequence

import torch

from dsv4_cluster.protocol.request import SamplingParams

_FIRST_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one sequence and how often each was generated; 0 = it occurs in the prompt only."""

    def __init__(self, prompt_token_ids: Sequence[int], device: torch.device) -> None:
        """prompt_token_ids: empty when only generated tokens count."""
        distinct = torch.tensor(prompt_token_ids, dtype=torch.int64).unique()
        self._index = {token_id: i for i, token_id in enumerate(distinct.tolist())}
        capacity = max(_FIRST_CAPACITY, 2 * len(distinct))
        self._token_ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._counts = torch.zeros(capacity, dtype=torch.float32, device=device)
        self._token_ids[: len(distinct)] = distinct.to(device)

    def add(self, token_id: int) -> None:
        """Count one generated token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = len(self._index)
            if index == len(self._token_ids):
                self._token_ids = torch.cat([self._token_ids, torch.zeros_like(self._token_ids)])
                self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
            self._token_ids[index] = token_id
        self._counts[index] += 1

    def entries(self, draft_token_ids: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids [N] int64, counts [N] fp32) as they are once `draft_token_ids` are generated too.

        Without drafts these are views, good until the next `add`.
        """
        size = len(self._index)
        token_ids, counts = self._token_ids[:size], self._counts[:size]
        if not draft_token_ids:
            return token_ids, counts
        fresh = [token_id for token_id in dict.fromkeys(draft_token_ids) if token_id not in self._index]
        new = {token_id: size + i for i, token_id in enumerate(fresh)}
        token_ids = torch.cat([token_ids, token_ids.new_tensor(fresh)])
        counts = torch.cat([counts, counts.new_zeros(len(fresh))])
        for token_id in draft_token_ids:
            counts[new[token_id] if token_id in new else self._index[token_id]] += 1
        return token_ids, counts


class LogitEdits:
    """Bias and penalties of one sequence; made once per sequence, told every token that is final."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], device: torch.device) -> None:
        self.bias_token_ids = torch.tensor([t for t, _ in params.logit_bias], dtype=torch.int64, device=device)
        self.bias = torch.tensor([value for _, value in params.logit_bias], dtype=torch.float32, device=device)
        self.counts: TokenCounts | None = None
        if has_penalties(params):
            self.counts = TokenCounts(prompt_token_ids if params.repetition_penalty != 1 else (), device)
        values = [params.presence_penalty, params.frequency_penalty, params.repetition_penalty]
        self.penalties = torch.tensor(values, dtype=torch.float32, device=device)  # [3]

    @classmethod
    def create(
        cls, params: SamplingParams, prompt_token_ids: Sequence[int], device: torch.device
    ) -> "LogitEdits | None":
        """None for a sequence that changes nothing: it costs nothing then."""
        if not params.logit_bias and not has_penalties(params):
            return None
        return cls(params, prompt_token_ids, device)

    def add(self, token_id: int) -> None:
        """Count one generated token."""
        if self.counts is not None:
            self.counts.add(token_id)


def has_penalties(params: SamplingParams) -> bool:
    """True when tokens that occurred are treated differently."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
