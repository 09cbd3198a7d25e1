"""Public sampling ops.

The order of a step: bias and bans (`add_bias`, `apply_bitmask`, `ban_tokens`), penalties (`apply_penalties`), then
`sample`: temperature, top_k, top_p, min_p, noise, argmax. Edits touch only the rows and tokens they name; on a device
a row or token outside the logits names none, so that lists of a fixed length can be padded. All ops are
batch-invariant: what a row gives does not depend on the rows beside it.
"""

from types import ModuleType

import torch

from dsv4_kernels.dispatch import AUTO, implementation


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, *, impl: str = AUTO) -> torch.Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token id).

    seeds, positions: [R] int64.
    Returns: [R, vocab_size] fp32, finite.
    """
    module = implementation("sampling", seeds.device, torch.float32, impl)
    return module.gumbel_noise(seeds, positions, vocab_size)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    impl: str = AUTO,
) -> torch.Tensor:
    """Choose one token per row: argmax at temperature 0, else Gumbel-max over what top_k, top_p and min_p leave.

    logits: [R, V] fp32, finite or -inf (banned). temperature: [R] fp32, >= 0. top_p: [R] fp32 in (0, 1].
    top_k: [R] int64, 0 = all. min_p: [R] fp32 in [0, 1]. None = no row uses it.
    seeds, positions: [R] int64; position is the index in the sequence of the token being chosen.
    Returns: [R] int64.
    """
    return _module(logits, impl).sample(logits, temperature, top_p, seeds, positions, top_k=top_k, min_p=min_p)


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor, *, impl: str = AUTO
) -> None:
    """Add to single logits, in place.

    logits: [R, V] fp32. rows, token_ids: [N] int64, no pair twice. bias: [N] fp32.
    """
    _module(logits, impl).add_bias(logits, rows, token_ids, bias)


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor, *, impl: str = AUTO) -> None:
    """Set what a mask does not allow to -inf, in place.

    logits: [R, V] fp32. rows: [M] int64, distinct. bitmask: [M, W] int32; bit i % 32 of word i // 32 allows token i,
    tokens beyond 32 * W are not allowed.
    """
    _module(logits, impl).apply_bitmask(logits, rows, bitmask)


def ban_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    masked_rows: torch.Tensor | None = None,
    impl: str = AUTO,
) -> None:
    """Set single logits to -inf, in place.

    logits: [R, V] fp32. rows, token_ids: [N] int64. masked_rows: [M] int64, rows that `apply_bitmask` has cut: where
    the bans would take the last token away, they are dropped, because a grammar that allows only the end has ended.
    """
    _module(logits, impl).ban_tokens(logits, rows, token_ids, masked_rows)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
    *,
    impl: str = AUTO,
) -> None:
    """Make tokens that occurred less probable, in place.

    x becomes (x / r if x > 0 else x * r) - f * count - p * (count > 0).
    logits: [R, V] fp32. rows, token_ids: [N] int64, no pair twice: the tokens that occurred, in the prompt or after.
    counts: [N] fp32, how often each was generated; 0 = it is in the prompt only.
    penalties: [N, 3] fp32, presence p, frequency f and repetition r of each entry's row.
    Source: OpenAI API reference (p, f); Keskar et al. 2019, section 4.1 (r), extended to negative logits.
    """
    _module(logits, impl).apply_penalties(logits, rows, token_ids, counts, penalties)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, *, impl: str = AUTO
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural-log probabilities of one token per row and of the `num_top` most probable ones.

    logits: [R, V] fp32. token_ids: [R] int64 in 0 .. V - 1.
    Returns: [R] fp32; ids [R, num_top] int64, the most probable first, ties to the lower id; [R, num_top] fp32.
    Raises: ValueError when num_top exceeds V.
    """
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"{num_top} of {logits.shape[1]} tokens asked for")
    return _module(logits, impl).token_logprobs(logits, token_ids, num_top)  # type: ignore[no-any-return]


def verify_drafts(
    drafts: torch.Tensor, sampled: torch.Tensor, is_finite: torch.Tensor, *, impl: str = AUTO
) -> torch.Tensor:
    """How many sampled tokens of a step stand: the accepted drafts and the token sampled after them.

    drafts: [B, k] int64, -1 = none. sampled: [B, k + 1] int64, entry j sampled after the first j drafts. is_finite:
    [B, k + 1] bool, False = the row's logits held NaN or inf; it ends the step before its token.
    Returns: [B] int32 in 0 .. k + 1. Raises: ValueError when shapes do not fit.
    """
    if sampled.shape != is_finite.shape or sampled.shape != (drafts.shape[0], drafts.shape[1] + 1):
        raise ValueError(f"drafts {tuple(drafts.shape)}, sampled {tuple(sampled.shape)}, {tuple(is_finite.shape)}")
    module = implementation("sampling", drafts.device, torch.float32, impl)
    return module.verify_drafts(drafts, sampled, is_finite)


def _module(logits: torch.Tensor, impl: str) -> ModuleType:
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"logits are {logits.dtype} with {logits.ndim} dims, expected fp32 with 2")
    return implementation("sampling", logits.device, logits.dtype, impl)
