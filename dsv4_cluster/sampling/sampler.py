"""Choose the next token of every row."""

from dataclasses import dataclass

import torch

from dsv4_cluster.protocol.output import TokenLogprobs
from dsv4_cluster.sampling.batch import SamplingBatch
from dsv4_cluster.sampling.logprobs import top_logprobs
from dsv4_kernels.sampling.op import sample


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Host-side result for R rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]  # None where the row did not ask
    is_finite: list[bool]  # False: the row's logits held NaN or inf and its token means nothing


def sample_tokens(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    """Sample one token per row and collect the log-probabilities asked for.

    logits: [R, V] fp32; not changed. Log-probabilities are those of the model, before temperature and bans.
    """
    is_finite = torch.isfinite(logits).all(dim=-1)
    allowed = logits
    if batch.banned_rows.numel():
        allowed = logits.clone()
        allowed[batch.banned_rows, batch.banned_ids] = float("-inf")
    token_ids = sample(allowed, batch.temperature, batch.top_p, batch.seeds, batch.positions)
    logprobs: list[TokenLogprobs | None] = [None] * len(batch.num_logprobs)
    rows = [i for i, count in enumerate(batch.num_logprobs) if count is not None]
    if rows:
        counts = [batch.num_logprobs[i] or 0 for i in rows]
        index = torch.tensor(rows, device=logits.device)
        for i, entry in zip(rows, top_logprobs(logits[index], token_ids[index], counts), strict=True):
            logprobs[i] = entry
    return SampledTokens(token_ids.tolist(), logprobs, is_finite.tolist())
