"""Sampling in plain torch: noise as a pure function of (seed, position) and the Gumbel-max choice.

A counter-based generator instead of a stateful one: the same (seed, position) draws the same noise on any replica, in
any batch and after any replay. Source: splitmix64 (Steele, Lea, Flood 2014) for the bit mixing.
"""

import torch

from dsv4_kernels.sampling.edits import add_bias, apply_bitmask, apply_penalties, ban_tokens
from dsv4_kernels.sampling.truncate import truncate

__all__ = [
    "add_bias",
    "apply_bitmask",
    "apply_penalties",
    "ban_tokens",
    "gumbel_noise",
    "mix64",
    "sample",
    "token_logprobs",
    "verify_drafts",
]

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finaliser on int64 tensors, wrapping."""
    return _mix64_(x.clone(), torch.empty_like(x))


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise; see op.py for shapes.

    u has 32 bits and a half, so 1 - u is exact in fp64 and the exponential variate -log(1 - u) keeps full precision
    where it is small, which decides the argmax. Logarithms in fp64, then one rounding: implementations whose logarithms
    are good to 2^-50 give the same fp32 number in all but one of 2^25 draws, and tokens do not depend on the machine.
    In place throughout: at V = 129,280 fresh tensors for every step would cost four times as much on CPU.
    """
    state = mix64(mix64(seeds) + positions * _GOLDEN)  # [R]
    bits = torch.arange(1, vocab_size + 1, device=seeds.device, dtype=torch.int64).mul_(_GOLDEN)  # [V]
    bits = state[:, None] + bits  # [R, V]
    scratch = torch.empty_like(bits)
    uniform = _shift_right(_mix64_(bits, scratch), 32, out=scratch).double()  # [R, V] integers below 2**32
    return uniform.add_(0.5).mul_(-(2.0**-32)).add_(1.0).log_().neg_().log_().neg_().float()


def _mix64_(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """`mix64` in place."""
    x.bitwise_xor_(_shift_right(x, 30, out=scratch)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27, out=scratch)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31, out=scratch))


def _shift_right(x: torch.Tensor, bits: int, *, out: torch.Tensor) -> torch.Tensor:
    """Logical right shift of signed 64-bit integers."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


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
    tile_rows = (
        1 if logits.device.type == "cpu" else max(1, rows.numel())
    )  # one row's temporaries fit in a core's cache
    for tile in rows.split(tile_rows) if rows.numel() else ():
        scaled = logits[tile]
        scaled = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).div_(temperature[tile, None])
        scaled = truncate(
            scaled,
            top_p=top_p[tile],
            top_k=torch.zeros_like(tile) if top_k is None else top_k[tile],
            min_p=torch.zeros_like(top_p[tile]) if min_p is None else min_p[tile],
        )
        noise = gumbel_noise(seeds[tile], positions[tile], logits.shape[-1])
        token_ids[tile] = torch.argmax(scaled.add_(noise), dim=-1)
    return token_ids


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See op.py. A stable sort: equal logits go to the lower id."""
    log_total = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
    own = logits.double().gather(1, token_ids[:, None]) - log_total
    top = logits.sort(dim=-1, descending=True, stable=True)
    values = (top.values[:, :num_top].double() - log_total).float()
    return own[:, 0].float(), top.indices[:, :num_top], values


def verify_drafts(drafts: torch.Tensor, sampled: torch.Tensor, is_finite: torch.Tensor) -> torch.Tensor:
    """See op.py: a step goes on while the row is finite and, but for the first, the draft before it was sampled."""
    agrees = torch.nn.functional.pad(drafts == sampled[:, :-1], (1, 0), value=True)
    return (agrees & is_finite).long().cumprod(dim=1).sum(dim=1).int()
