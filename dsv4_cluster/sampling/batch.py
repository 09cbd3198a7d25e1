"""The sampling parameters of one step as tensors, one row per token to choose.

Speculation chooses several tokens of one sequence in a step: each is a row of its own, whose `draft_token_ids` are the
drafts in front of it. The row is then sampled as it would be if those drafts were the sequence's last tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4_cluster.protocol.request import SamplingParams
from dsv4_cluster.sampling.processors import LogitEdits


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one sequence asks of the sampler for one token."""

    params: SamplingParams
    position: int  # index in the sequence of the token being chosen
    banned_token_ids: tuple[int, ...] = ()  # stop tokens while min_tokens is not reached
    edits: LogitEdits | None = None  # bias and penalties after the sequence's final tokens
    draft_token_ids: tuple[int, ...] = ()  # tokens between those and `position`
    allowed_mask: torch.Tensor | None = None  # [W] int32, bit i % 32 of word i // 32 allows token i; at least one bit
    forced_token_id: int | None = None  # chosen whatever the logits are
    replaced_token: tuple[int, int] | None = None  # (token, what is taken instead when it is drawn)


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """N single logits."""

    rows: torch.Tensor  # [N] int64
    token_ids: torch.Tensor  # [N] int64
    values: torch.Tensor  # [N] fp32: bias, or times generated


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Device tensors for R rows; None where no row needs the step."""

    temperature: torch.Tensor  # [R] fp32
    top_p: torch.Tensor  # [R] fp32
    seeds: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64
    num_logprobs: tuple[int | None, ...]  # per row
    top_k: torch.Tensor | None = None  # [R] int64, 0 = all
    min_p: torch.Tensor | None = None  # [R] fp32
    bans: TokenEdits | None = None  # values unused
    bias: TokenEdits | None = None
    counts: TokenEdits | None = None
    penalties: torch.Tensor | None = None  # [N of counts, 3] fp32: presence, frequency, repetition
    masked_rows: torch.Tensor | None = None  # [M] int64
    masks: torch.Tensor | None = None  # [M, W] int32
    forced_token_ids: torch.Tensor | None = None  # [R] int64, -1 = none
    replaced_tokens: torch.Tensor | None = None  # [R, 2] int64, -1 = none

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> "SamplingBatch":
        """Gather `rows` into tensors on `device`."""

        def ints(values: Sequence[int] | Sequence[tuple[int, int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def floats(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        params = [row.params for row in rows]
        masked = [(i, row.allowed_mask) for i, row in enumerate(rows) if row.allowed_mask is not None]
        is_forced = any(row.forced_token_id is not None for row in rows)
        is_replaced = any(row.replaced_token is not None for row in rows)
        counts, penalties = _counts(rows, device)
        return cls(
            temperature=floats([p.temperature for p in params]),
            top_p=floats([p.top_p for p in params]),
            seeds=ints([p.seed for p in params]),
            positions=ints([row.position for row in rows]),
            num_logprobs=tuple(p.logprobs for p in params),
            top_k=ints([p.top_k for p in params]) if any(p.top_k for p in params) else None,
            min_p=floats([p.min_p for p in params]) if any(p.min_p for p in params) else None,
            bans=_bans(rows, device),
            bias=_bias(rows, device),
            counts=counts,
            penalties=penalties,
            masked_rows=ints([i for i, _ in masked]) if masked else None,
            masks=torch.stack([mask for _, mask in masked]).to(device) if masked else None,
            forced_token_ids=ints([-1 if r.forced_token_id is None else r.forced_token_id for r in rows])
            if is_forced
            else None,
            replaced_tokens=ints([r.replaced_token or (-1, -1) for r in rows]) if is_replaced else None,
        )


def _bans(rows: Sequence[SamplingRow], device: torch.device) -> TokenEdits | None:
    pairs = [(i, token_id) for i, row in enumerate(rows) for token_id in row.banned_token_ids]
    if not pairs:
        return None
    index = torch.tensor(pairs, dtype=torch.int64, device=device)
    return TokenEdits(index[:, 0], index[:, 1], torch.empty(0, device=device))


def _bias(rows: Sequence[SamplingRow], device: torch.device) -> TokenEdits | None:
    biased = [(i, row.edits) for i, row in enumerate(rows) if row.edits is not None and row.params.logit_bias]
    if not biased:
        return None
    token_ids = [edits.bias_token_ids for _, edits in biased]
    return TokenEdits(
        _repeated([i for i, _ in biased], token_ids, device),
        torch.cat(token_ids),
        torch.cat([edits.bias for _, edits in biased]),
    )


def _counts(rows: Sequence[SamplingRow], device: torch.device) -> tuple[TokenEdits | None, torch.Tensor | None]:
    """(entries of all rows with penalties, [N, 3] penalties of each entry)."""
    penalised = [(i, row, row.edits) for i, row in enumerate(rows) if row.edits and row.edits.counts]
    if not penalised:
        return None, None
    entries = [edits.counts.entries(row.draft_token_ids) for _, row, edits in penalised if edits.counts]
    token_ids = [ids for ids, _ in entries]
    edits = TokenEdits(
        _repeated([i for i, _, _ in penalised], token_ids, device),
        torch.cat(token_ids),
        torch.cat([counts for _, counts in entries]),
    )
    per_row = torch.stack([row_edits.penalties for _, _, row_edits in penalised])
    sizes = torch.tensor([len(ids) for ids in token_ids], device=device)
    return edits, per_row.repeat_interleave(sizes, dim=0)


def _repeated(rows: list[int], token_ids: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Each row number once per token id of that row."""
    sizes = torch.tensor([len(ids) for ids in token_ids], device=device)
    return torch.tensor(rows, dtype=torch.int64, device=device).repeat_interleave(sizes)
