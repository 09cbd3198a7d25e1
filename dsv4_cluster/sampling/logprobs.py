"""Log-probabilities of chosen and most probable tokens."""

from collections.abc import Sequence

import torch

from dsv4_cluster.protocol.output import TokenLogprobs


def top_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Natural-log probabilities per row: the chosen token first, then the `num_top` most probable ones.

    logits: [R, V] fp32. chosen: [R] int64. num_top: R counts, 0 = only the chosen token.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    most = max(num_top, default=0)
    if most:
        values, ids = torch.topk(logprobs, min(most, logits.shape[-1]), dim=-1)
        top_values, top_ids = values.tolist(), ids.tolist()
    result: list[TokenLogprobs] = []
    for row, (token_id, count) in enumerate(zip(chosen.tolist(), num_top, strict=True)):
        entry = {token_id: own[row]}
        if count:
            entry.update(zip(top_ids[row][:count], top_values[row][:count], strict=True))
        result.append(entry)
    return result
