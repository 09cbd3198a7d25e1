"""Public op on cache rows: from the latent projection to stored rows in one launch. Source: spec 4.3, 6.1."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.kv.rows import PagedRows

_KINDS = ("plain", "kv_fp8")


def insert(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cis: torch.Tensor,
    pool: PagedRows,
    slots: torch.Tensor,
    *,
    impl: str = AUTO,
) -> torch.Tensor:
    """Normalise, rotate and round latent rows, and store them in a window pool.

    kv: [T, dim] float, the projection. weight: [dim] fp32. cis: [T, P] complex64 of `rope.rotations`.
    pool: mutated. slots: [T] int64, distinct where they are valid; a negative one, or one beyond the pool, writes
    nothing. Returns: [T, dim] of kv's dtype, the rows as the pool reads them back, unstored ones too.
    Batch-invariant: a row's bits do not depend on the rows beside it.
    Raises: ValueError when the pool's format is not one of window rows, or shapes do not fit.
    """
    if pool.format.kind not in _KINDS or pool.format.dim != kv.shape[1]:
        raise ValueError(f"pool {pool.format} takes no rows of {kv.shape[1]} values; expected a format of {_KINDS}")
    if cis.shape[0] != kv.shape[0] or 2 * cis.shape[1] > kv.shape[1] or slots.shape != kv.shape[:1]:
        raise ValueError(f"rotations {tuple(cis.shape)} or slots {tuple(slots.shape)} do not fit kv {tuple(kv.shape)}")
    return implementation("kv", kv.device, kv.dtype, impl).insert(kv, weight, eps, cis, pool, slots)
