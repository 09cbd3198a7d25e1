"""Sampling in plain torch: noise as a pure function of (seed, position) and the Gumbel-max choice.

A counter-based generator instead of a stateful one: the same (seed, position) draws the same noise on any replica, in
any batch and after any replay. Source: splitmix64 (Steele, Lea, Flood 2014) for the bit mixing.
"""

import torch

from dsv4_kernels.sampling.truncate import truncate

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MAX_UNIFORM = 1.0 - 2.0**-24  # largest fp32 below 1, keeps log1p(-u) finite


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser on int64 tensors, wrapping."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise; see op.py for shapes.

    The exponential variate is -log1p(-u), so that small values, which decide the argmax, keep full relative precision.
    """
    state = mix64(mix64(seeds) + positions * _GOLDEN)  # [R]
    counter = torch.arange(1, vocab_size + 1, device=seeds.device, dtype=torch.int64) * _GOLDEN  # [V]
    bits = _shift_right(mix64(state[:, None] + counter), 32)  # [R, V] uniform 32-bit integers
    uniform = ((bits.double() + 0.5) * 2.0**-32).float().clamp_(max=_MAX_UNIFORM)
    return torch.log(-torch.log1p(-uniform)).neg_()


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    top_k: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Choose one token per row; see op.py for shapes.

    The row's maximum is taken off before the division: a temperature near 0 then gives 0 and -inf, never inf - inf.
    """
    token_ids = torch.argmax(logits, dim=-1)
    rows = torch.nonzero(temperature > 0).flatten()
    if rows.numel() == 0:
        return token_ids
    scaled = logits[rows]
    scaled = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).div_(temperature[rows, None])
    scaled = truncate(
        scaled,
        top_p=top_p[rows],
        top_k=torch.zeros_like(rows) if top_k is None else top_k[rows],
        min_p=torch.zeros_like(top_p[rows]) if min_p is None else min_p[rows],
    )
    noise = gumbel_noise(seeds[rows], positions[rows], logits.shape[-1])
    token_ids[rows] = torch.argmax(scaled.add_(noise), dim=-1)
    return token_ids
