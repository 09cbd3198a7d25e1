"""Public sampling ops.

The order of a step: bias and bans (`add_bias`, `apply_bitmask`, `ban_tokens`), penalties (`apply_penalties`), then
`sample`: temperature, top_k, top_p, min_p, noise, argmax. Edits touch only the rows and tokens they name.
"""

import torch

from dsv4_kernels.dispatch import choose
from dsv4_kernels.sampling import edits, reference


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token id).

    seeds, positions: [R] int64.
    Returns: [R, vocab_size] fp32, finite.
    """
    choose("sampling", seeds.device, torch.float32)
    return reference.gumbel_noise(seeds, positions, vocab_size)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose one token per row: argmax at temperature 0, else Gumbel-max over what top_k, top_p and min_p leave.

    logits: [R, V] fp32, finite or -inf (banned). temperature: [R] fp32, >= 0. top_p: [R] fp32 in (0, 1].
    top_k: [R] int64, 0 = all. min_p: [R] fp32 in [0, 1]. None = no row uses it.
    seeds, positions: [R] int64; position is the index in the sequence of the token being chosen.
    Returns: [R] int64.
    """
    _check(logits)
    return reference.sample(logits, temperature, top_p, seeds, positions, top_k=top_k, min_p=min_p)


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Add to single logits, in place.

    logits: [R, V] fp32. rows, token_ids: [N] int64, no pair twice. bias: [N] fp32.
    """
    _check(logits)
    edits.add_bias(logits, rows, token_ids, bias)


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set what a mask does not allow to -inf, in place.

    logits: [R, V] fp32. rows: [M] int64, distinct. bitmask: [M, W] int32; bit i % 32 of word i // 32 allows token i,
    tokens beyond 32 * W are not allowed.
    """
    _check(logits)
    edits.apply_bitmask(logits, rows, bitmask)


def ban_tokens(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, *, masked_rows: torch.Tensor | None = None
) -> None:
    """Set single logits to -inf, in place.

    logits: [R, V] fp32. rows, token_ids: [N] int64. masked_rows: [M] int64, rows that `apply_bitmask` has cut: where
    the bans would take the last token away, they are dropped, because a grammar that allows only the end has ended.
    """
    _check(logits)
    edits.ban_tokens(logits, rows, token_ids, masked_rows)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Make tokens that occurred less probable, in place.

    x becomes (x / r if x > 0 else x * r) - f * count - p * (count > 0).
    logits: [R, V] fp32. rows, token_ids: [N] int64, no pair twice: the tokens that occurred, in the prompt or after.
    counts: [N] fp32, how often each was generated; 0 = it is in the prompt only.
    penalties: [N, 3] fp32, presence p, frequency f and repetition r of each entry's row.
    Source: OpenAI API reference (p, f); Keskar et al. 2019, section 4.1 (r), extended to negative logits.
    """
    _check(logits)
    edits.apply_penalties(logits, rows, token_ids, counts, penalties)


def _check(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"logits are {logits.dtype} with {logits.ndim} dims, expected fp32 with 2")
    choose("sampling", logits.device, logits.dtype)
