"""Public sampling ops."""

import torch

from dsv4_kernels.dispatch import choose
from dsv4_kernels.sampling import reference


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, token id).

    seeds, positions: [R] int64.
    Returns: [R, vocab_size] fp32, finite.
    """
    choose("sampling", seeds.device, torch.float32)
    return reference.gumbel_noise(seeds, positions, vocab_size)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Choose one token per row: argmax at temperature 0, else Gumbel-max over the nucleus.

    logits: [R, V] fp32, finite or -inf (banned). temperature: [R] fp32, >= 0. top_p: [R] fp32 in (0, 1].
    seeds, positions: [R] int64; position is the index in the sequence of the token being chosen.
    Returns: [R] int64.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"logits are {logits.dtype} with {logits.ndim} dims, expected fp32 with 2")
    choose("sampling", logits.device, logits.dtype)
    return reference.sample(logits, temperature, top_p, seeds, positions)
