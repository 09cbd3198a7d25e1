"""top_k, top_p and min_p: each keeps a run of the most probable tokens, so together they are one number per row.

The number is found on the sorted head of the row; only a row whose run is longer than the head is sorted whole. Which
of the two happens depends on the row alone, so a row is cut the same way in any batch.
"""

import torch

HEAD_SIZE = 2048  # a sort of V = 129,280 logits costs ten times a top-2048 on CPU; runs are nearly always shorter


def truncate(
    scaled: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, head_size: int = HEAD_SIZE
) -> torch.Tensor:
    """Set to -inf what top_k, then top_p, then min_p leave out; equally probable tokens go to the lower id.

    scaled: [R, V] fp32 logits after temperature; not changed, but returned as it is when no row is cut.
    top_k: [R] int64, the k most probable tokens, 0 = all.
    top_p: [R] fp32, the shortest run whose mass, as a share of what top_k leaves, reaches top_p; >= 1 = all.
    min_p: [R] fp32, tokens of at least min_p times the probability of the most probable one; 0 = all.
    Returns: [R, V] fp32.
    """
    vocab_size = scaled.shape[-1]
    rows = torch.nonzero(((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)).flatten()
    if rows.numel() == 0:
        return scaled
    limits = (top_k[rows], top_p[rows], min_p[rows])
    size = min(head_size, vocab_size)
    cut, is_known = _cut(scaled[rows], limits, size)
    longer = torch.nonzero(~is_known).flatten()
    if longer.numel():
        cut[longer], _ = _cut(scaled[rows[longer]], tuple(limit[longer] for limit in limits), vocab_size)
    if rows.numel() == scaled.shape[0]:
        return cut
    return scaled.index_copy(0, rows, cut)


def _cut(scaled: torch.Tensor, limits: tuple[torch.Tensor, ...], head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns: ([R, V] cut rows, [R] bool, False where the head is too short to tell)."""
    head = torch.topk(scaled, head_size, dim=-1).values  # [R, H], descending; the order of equals does not matter
    length = _run_length(head, torch.logsumexp(scaled, dim=-1), *limits)  # [R]
    last = head.gather(1, length[:, None] - 1)  # [R, 1]
    above, tied = scaled > last, scaled == last
    num_tied = length - above.sum(dim=-1)
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_tied[:, None]))
    is_known = (length < head_size) & (limits[0] <= head_size)  # the mass of top_k tokens needs all of them
    return scaled.masked_fill(~kept, float("-inf")), is_known | (head_size == scaled.shape[-1])


def _run_length(
    head: torch.Tensor, log_total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """How many of the sorted tokens stay, at least one. Masses in fp64: sums of 1e5 small terms keep their order."""
    ranks = torch.arange(head.shape[-1], device=head.device)
    has_k = top_k > 0
    within_k = ~has_k[:, None] | (ranks < top_k[:, None])  # [R, H]
    candidates = head.masked_fill(~within_k, float("-inf"))
    log_mass = torch.where(has_k, torch.logsumexp(candidates, dim=-1), log_total)
    probs = torch.exp(candidates.double() - log_mass[:, None].double())
    mass_before = probs.cumsum(dim=-1) - probs
    within_p = (mass_before < top_p[:, None]) | (top_p >= 1)[:, None]
    within_min = head >= head[:, :1] + min_p.log()[:, None]  # log(0) = -inf keeps all
    return (within_k & within_p & within_min).sum(dim=-1).clamp_(min=1)
