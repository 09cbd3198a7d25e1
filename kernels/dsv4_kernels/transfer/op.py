"""Public ops of cache transfer: rows of a pool to the bytes of a segment and back, checked on the way.

The checksum of a segment [N, B] bytes, modulo 2^64, with rows padded by zeros to W = ceil(B / 8) little-endian words:

    N * B + sum over r, c of mix64(word[r, c] + (r * W + c + 1) * 0x9E3779B97F4A7C15)

mix64 is the splitmix64 finaliser, a bijection: a change of one word always changes the sum. Keys by position tell
exchanged words apart, and the sum has no order, so that the device forms it while it copies. It guards against
accidents (a reused buffer, a truncated stream, a flipped bit), not against an attacker. The host's transports hash
whole streams with XXH3, whose stripes are a chain and do not suit a GPU; the two are not interchangeable.
Source of mix64: Steele, Lea, Flood 2014.
"""

import torch

from dsv4_kernels.dispatch import AUTO, implementation
from dsv4_kernels.kv.rows import PagedRows


def checksum(raw: torch.Tensor, *, impl: str = AUTO) -> torch.Tensor:
    """raw: [N, B] uint8. Returns: [1] int64, the checksum above as a signed integer, on the device."""
    return implementation("transfer", raw.device, raw.dtype, impl).checksum(raw)


def pack(pool: PagedRows, slots: torch.Tensor, *, impl: str = AUTO) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload of rows, as `PagedRows.read_raw` orders it, and its checksum, in one pass.

    slots: [N] int64; one below 0 or beyond the pool gives zeros. Returns: raw [N, pool.row_bytes] uint8; [1] int64.
    """
    return implementation("transfer", slots.device, pool.pages.dtype, impl).pack(pool, slots)  # type: ignore[no-any-return]


def unpack(pool: PagedRows, slots: torch.Tensor, raw: torch.Tensor, *, impl: str = AUTO) -> torch.Tensor:
    """Store what `pack` returned, and return the checksum of `raw`; the caller compares it before the rows are used.

    pool: mutated. slots: [N] int64, distinct where they are valid; one below 0 or beyond the pool stores nothing.
    raw: [N, pool.row_bytes] uint8. Returns: [1] int64. Raises: ValueError when raw does not fit.
    """
    if tuple(raw.shape) != (slots.shape[0], pool.row_bytes):
        raise ValueError(f"raw has shape {tuple(raw.shape)}, expected {(slots.shape[0], pool.row_bytes)}")
    return implementation("transfer", slots.device, pool.pages.dtype, impl).unpack(pool, slots, raw)
