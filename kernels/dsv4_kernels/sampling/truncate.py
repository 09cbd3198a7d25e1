"""top_k, top_p and min_p: each keeps a run of the most probable tokens, so together they are one number per row.

The number is found on the sorted head of the row; a row whose run is longer gets a longer head, at last all of it. How
long depends on the row alone, so a row is cut the same way in any batch.
"""

import torch

HEAD_SIZES = (64, 2048)  # of V = 129,280 logits on CPU: top-64 costs 0.2 ms, top-2048 1 ms, a whole sort 10 ms


def truncate(
    scaled: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    head_sizes: tuple[int, ...] = HEAD_SIZES,
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
    whole = rows.numel() == scaled.shape[0]
    cut = _cut(scaled if whole else scaled[rows], (top_k[rows], top_p[rows], min_p[rows]), head_sizes)
    return cut if whole else scaled.index_copy(0, rows, cut)


def _cut(scaled: torch.Tensor, limits: tuple[torch.Tensor, ...], head_sizes: tuple[int, ...]) -> torch.Tensor:
    """Find each row's run on the shortest head that shows its end, then cut. Returns: [R, V]."""
    num_rows, vocab_size = scaled.shape
    log_total = torch.logsumexp(scaled, dim=-1)  # [R]
    length = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    last = scaled.new_empty(num_rows)  # the least logit that stays
    rows = torch.arange(num_rows, device=scaled.device)
    for size in (*(size for size in head_sizes if size < vocab_size), vocab_size):
        head = torch.topk(scaled[rows], size, dim=-1).values  # descending; the order of equals does not matter
        limit = tuple(each[rows] for each in limits)
        length[rows] = _run_length(head, log_total[rows], *limit)
        last[rows] = head.gather(1, length[rows, None] - 1)[:, 0]
        rows = rows[(length[rows] == size) | (limit[0] > size)]  # too short; the mass of top_k tokens needs all of them
        if rows.numel() == 0:
            break
    above, tied = scaled > last[:, None], scaled == last[:, None]
    num_tied = length - above.sum(dim=-1)
    kept = above | (tied & (tied.cumsum(dim=-1) <= num_tied[:, None]))
    return scaled.masked_fill(~kept, float("-inf"))


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
