"""Choose the next token of every row.

The order: bias, grammar mask and bans; repetition, then frequency and presence penalties; temperature; top_k; top_p of
what top_k leaves; min_p; noise; then a forced or a replaced token. Rows that ask for none of it pay for none of it.
"""

from dataclasses import dataclass

import torch

from dsv4_cluster.protocol.output import TokenLogprobs
from dsv4_cluster.sampling.batch import SamplingBatch
from dsv4_cluster.sampling.logprobs import top_logprobs
from dsv4_kernels.sampling.op import add_bias, apply_bitmask, apply_penalties, ban_tokens, sample


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Host-side result for R rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]  # None where the row did not ask
    is_finite: list[bool]  # False: the row's logits held NaN or inf and its token means nothing


def sample_tokens(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    """Sample one token per row and collect the log-probabilities asked for.

    logits: [R, V] fp32; not changed. Log-probabilities are those of the model: before bias, bans, penalties and
    temperature, also for a token that was forced.
    """
    is_finite = torch.isfinite(logits.sum(dim=-1))  # one inf or NaN makes the sum so; all() costs 30 times as much
    token_ids = sample(
        _edited(logits, batch),
        batch.temperature,
        batch.top_p,
        batch.seeds,
        batch.positions,
        top_k=batch.top_k,
        min_p=batch.min_p,
    )
    if batch.replaced_tokens is not None:
        drawn, taken = batch.replaced_tokens.unbind(-1)
        token_ids = torch.where(token_ids == drawn, taken, token_ids)
    if batch.forced_token_ids is not None:
        token_ids = torch.where(batch.forced_token_ids >= 0, batch.forced_token_ids, token_ids)
    logprobs: list[TokenLogprobs | None] = [None] * len(batch.num_logprobs)
    rows = [i for i, count in enumerate(batch.num_logprobs) if count is not None]
    if rows:
        counts = [batch.num_logprobs[i] or 0 for i in rows]
        index = torch.tensor(rows, device=logits.device)
        for i, entry in zip(rows, top_logprobs(logits[index], token_ids[index], counts), strict=True):
            logprobs[i] = entry
    return SampledTokens(token_ids.tolist(), logprobs, is_finite.tolist())


def _edited(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The logits after bias, masks, bans and penalties; `logits` itself when no row has any."""
    if batch.bias is None and batch.masks is None and batch.bans is None and batch.counts is None:
        return logits
    edited = logits.clone()  # 1 % of what drawing noise for the row costs
    if batch.bias is not None:
        add_bias(edited, batch.bias.rows, batch.bias.token_ids, batch.bias.values)
    if batch.masks is not None and batch.masked_rows is not None:
        apply_bitmask(edited, batch.masked_rows, batch.masks)
    if batch.bans is not None:
        ban_tokens(edited, batch.bans.rows, batch.bans.token_ids, masked_rows=batch.masked_rows)
    if batch.counts is not None and batch.penalties is not None:
        apply_penalties(edited, batch.counts.rows, batch.counts.token_ids, batch.counts.values, batch.penalties)
    return edited
