"""Drafters whose quality the test decides."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from random import Random
from typing import Any

import torch

from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.sampling.batch import SamplingBatch
from dsv4_cluster.sampling.sampler import sample_tokens
from dsv4_cluster.speculation.proposer import DraftRow

VOCABULARY = 512


class WrongAtProposer:
    """Knows the answer; of every run of drafts the one at `wrong_at` is wrong, and none when that is None."""

    def __init__(self, num_prompt_tokens: int, answer: Sequence[int], wrong_at: int | None) -> None:
        self._num_prompt_tokens, self._answer, self._wrong_at = num_prompt_tokens, answer, wrong_at

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        drafts = []
        for row in rows:
            first = len(row.token_ids) - self._num_prompt_tokens
            right = list(self._answer[first : first + row.num_drafts])
            if self._wrong_at is not None and self._wrong_at < len(right):
                right[self._wrong_at] = (right[self._wrong_at] + 1) % VOCABULARY
            drafts.append(right)
        return drafts


class CountedProposer:
    """The same drafts over and over."""

    def __init__(self, drafts: Sequence[list[int]]) -> None:
        self._drafts = cycle(drafts)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [next(self._drafts)[: row.num_drafts] for row in rows]


class NoisyTargetProposer:
    """Draws from the target's own distribution plus Gaussian noise, with the target's sampling noise.

    It knows the distributions along the plain answer only, which is enough: behind a wrong draft nothing is checked.
    """

    def __init__(self, requests: Sequence[GenerationRequest], answers: Mapping[str, Any], *, scale: float) -> None:
        """answers: by request id, with log-probabilities of the whole vocabulary. scale: deviation of the noise."""
        self._answers = {request.prompt_token_ids: answers[request.request_id] for request in requests}
        self._scale = scale
        self._generator = torch.Generator().manual_seed(0)
        self.num_first, self.num_first_right = 0, 0

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._drafts(row) for row in rows]

    def first_draft_rate(self) -> float:
        """How often the first draft of a run was right."""
        return self.num_first_right / self.num_first

    def _drafts(self, row: DraftRow) -> list[int]:
        prompt, answer = next((p, a) for p, a in self._answers.items() if tuple(row.token_ids[: len(p)]) == p)
        first = len(row.token_ids) - len(prompt)
        drafts: list[int] = []
        for position in range(first, min(first + row.num_drafts, len(answer.token_ids))):
            logprobs = torch.tensor([[answer.logprobs[position][t] for t in range(VOCABULARY)]])
            noisy = logprobs + self._scale * torch.randn(logprobs.shape, generator=self._generator)
            batch = SamplingBatch.build([row.sampling_row(drafts)], noisy.device)
            drafts += sample_tokens(noisy, batch).token_ids
        self.num_first += 1
        self.num_first_right += drafts[0] == answer.token_ids[first]
        return drafts


class RandomProposer:
    """Knows the answers; each draft is right with a chance, and some runs are shorter than asked for."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], rate: float, seed: int) -> None:
        """answers: by prompt. rate: chance that a draft is right."""
        self._answers, self._rate, self._random = answers, rate, Random(seed)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._drafts(row) for row in rows]

    def _drafts(self, row: DraftRow) -> list[int]:
        prompt = next(p for p in self._answers if tuple(row.token_ids[: len(p)]) == p)
        first = len(row.token_ids) - len(prompt)
        right = self._answers[prompt][first : first + self._random.randint(0, row.num_drafts)]
        return [token if self._random.random() < self._rate else (token + 1) % VOCABULARY for token in right]
