"""Public indexer ops. Source: spec 3.4, 4.5."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.kv.rows import PagedRows

_WORKSPACE_VALUES = 1 << 20  # fp32 logits held at once: 4 MiB
_MAX_ENTRIES = 1 << 22  # what an entry's number may take beside its score in one integer
_MAX_TOPK = 4096


def hadamard(x: torch.Tensor, *, impl: str = AUTO) -> torch.Tensor:
    """Orthonormal Hadamard rotation in Sylvester order of the last dim.

    x: [..., dim] float, dim a power of two. Returns: [..., dim] of x's dtype. Raises: ValueError on another dim.
    """
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(f"dim {dim} is not a power of two")
    return implementation("indexer", x.device, x.dtype, impl).hadamard(x)


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, *, impl: str = AUTO) -> torch.Tensor:
    """sum_h weights[t, h] * relu(q[t, h] . keys[n]), accumulated in fp32.

    q: [T, H, dim]. keys: [N, dim]. weights: [T, H] fp32, any sign. Returns: [T, N] fp32.
    """
    return implementation("indexer", q.device, q.dtype, impl).index_scores(q, keys, weights)


def select_topk(scores: torch.Tensor, num_visible: torch.Tensor, topk: int, *, impl: str = AUTO) -> torch.Tensor:
    """The min(topk, visible) best of each row's first `num_visible` entries; equal scores go to the lower entry.

    scores: [T, N] fp32. num_visible: [T] int64. Returns: [T, min(topk, N)] int64, ascending, -1 = none behind them.
    """
    module = implementation("indexer", scores.device, scores.dtype, impl)
    return module.select_topk(scores, num_visible, topk)


def index_topk(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    *,
    impl: str = AUTO,
) -> torch.Tensor:
    """`index_scores` and `select_topk` in one, tiled over queries to a fixed workspace.

    q: [T, H, dim]. keys: [N, dim]. weights: [T, H] fp32. num_visible: [T] int64.
    Returns: [T, min(topk, N)] int64, ascending, -1 = none behind them. Raises: ValueError when q and weights disagree.
    """
    if weights.shape != q.shape[:2]:
        raise ValueError(f"weights {tuple(weights.shape)} do not fit q {tuple(q.shape)}")
    tile = max(1, _WORKSPACE_VALUES // max(1, q.shape[1] * keys.shape[0]))
    module = implementation("indexer", q.device, q.dtype, impl)
    return module.index_topk(q, keys, weights, num_visible, topk, tile)


def index_slots(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: PagedRows,
    page_table: torch.Tensor,
    seqs: torch.Tensor,
    num_visible: torch.Tensor,
    topk: int,
    *,
    impl: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each token's min(topk, visible) best entries, straight from the pages of keys.

    q: [T, H, dim], rounded as the keys are (`quant.fake_quant_index`). weights: [T, H] fp32, any sign. pool: keys, dim
    values a row. page_table: [S, C] int64, the pages of each sequence. seqs: [T] int64, row of the page table.
    num_visible: [T] int64, entries that a token sees, 0 for a padded row; their pages exist.
    Returns: slots [T, topk] int64, `page * rows_per_page + row`, ascending by entry, -1 behind the last; equal scores
    go to the lower entry. Lengths [T] int32. The selection is exact for the scores as computed (fp32 sums; the tensor
    core's FP8 products carry about 14 bits).
    Graph-capturable, lengths are read on the device. Batch-invariant: a row's bits do not depend on the rows beside it.
    Raises: ValueError when shapes do not fit or a page table is wider than 2^22 entries or topk is beyond 4096.
    """
    fits = weights.shape == q.shape[:2] and seqs.shape == num_visible.shape == q.shape[:1]
    if not fits or q.shape[2] != pool.format.dim:
        raise ValueError(
            f"weights {tuple(weights.shape)}, seqs {tuple(seqs.shape)}, num_visible {tuple(num_visible.shape)} or rows "
            f"of {pool.format.dim} values do not fit q {tuple(q.shape)}"
        )
    width = page_table.shape[1] * pool.rows_per_page
    if width > _MAX_ENTRIES or not 0 < topk <= _MAX_TOPK:
        raise ValueError(f"{width} entries, limit {_MAX_ENTRIES}; top {topk}, expected 1 to {_MAX_TOPK}")
    module = implementation("indexer", q.device, q.dtype, impl)
    return module.index_slots(q, weights, pool, page_table, seqs, num_visible, topk)  # type: ignore[no-any-return]
