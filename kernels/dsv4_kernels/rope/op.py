"""Public rotary ops. Source: spec 3.3."""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.rope import reference


def plain_frequencies(rope_dim: int, theta: float) -> torch.Tensor:
    """theta^(-2i / rope_dim) for every pair i. Returns: [rope_dim / 2] fp32 on CPU."""
    return reference.plain_frequencies(rope_dim, theta)


def yarn_frequencies(
    rope_dim: int, theta: float, *, factor: float, original_positions: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    """Plain frequencies blended with their `factor`-times slower form; no magnitude factor anywhere.

    original_positions: context length before extension, in tokens. Returns: [rope_dim / 2] fp32 on CPU.
    """
    return reference.yarn_frequencies(rope_dim, theta, factor, original_positions, beta_fast, beta_slow)


def rotations(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """exp(j * position * frequency). positions: [T] int. frequencies: [P] fp32. Returns: [T, P] complex64."""
    return reference.rotations(positions, frequencies)


def norm_rope(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cis: torch.Tensor, *, impl: str = AUTO
) -> torch.Tensor:
    """`rms_norm` of every row, cast to x's dtype, then `apply_rope_`. Returns: a new tensor.

    x: [T, ..., dim]. weight: [dim] fp32 or None. cis: [T, P] complex64.
    Batch-invariant, as is `apply_rope_`: a row's bits do not depend on the rows beside it.
    """
    return implementation("rope", x.device, x.dtype, impl).norm_rope(x, weight, eps, cis)


def norm_rope_(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cis: torch.Tensor, *, impl: str = AUTO
) -> torch.Tensor:
    """`norm_rope` where x is not needed afterwards: the result may take its place. Use only what is returned."""
    return implementation("rope", x.device, x.dtype, impl).norm_rope_(x, weight, eps, cis)


def apply_rope_(x: torch.Tensor, cis: torch.Tensor, *, inverse: bool = False, impl: str = AUTO) -> torch.Tensor:
    """Rotate the trailing 2P dims of every row in place; interleaved pairs, fp32 math, one cast.

    x: [T, ..., dim] float, mutated. cis: [T, P] complex64 of `rotations`. inverse: rotate back.
    Returns: x. Raises: ValueError when the rows differ or 2P exceeds dim.
    """
    if x.shape[0] != cis.shape[0] or 2 * cis.shape[-1] > x.shape[-1]:
        raise ValueError(f"rotations {tuple(cis.shape)} do not fit x {tuple(x.shape)}")
    table = cis.view(cis.shape[0], *([1] * (x.dim() - 2)), cis.shape[1])
    return implementation("rope", x.device, x.dtype, impl).apply_rope_(x, table, inverse)
