"""Log-probabilities of a chosen token and of the most probable ones, in Triton: the best of tiles, then of those."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

_TILE = 4096

_LOWEST = tl.constexpr(-(2**63))


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    device = logits.device
    own = torch.empty(num_rows, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    values = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    if num_rows == 0:
        return own, ids, values
    logits = logits.contiguous()
    num_tiles = triton.cdiv(vocab_size, _TILE)
    maxima = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    masses = torch.empty_like(maxima)
    keys = torch.empty(num_rows, num_tiles, num_top, dtype=torch.int64, device=device)
    _best_kernel[(num_rows, num_tiles)](
        logits, maxima, masses, keys, vocab_size, num_tiles, TILE=_TILE, TOP=num_top, num_warps=4
    )
    _merge_kernel[(num_rows,)](
        logits, token_ids, maxima, masses, keys, own, ids, values, vocab_size, num_tiles,
        TILES=triton.next_power_of_2(num_tiles), KEYS=triton.next_power_of_2(max(1, num_tiles * num_top)), TOP=num_top,
        num_warps=4,
    )  # fmt: skip
    return own, ids, values


@triton.jit
def _best_kernel(logits, maxima, masses, keys, vocab_size, num_tiles, TILE: tl.constexpr, TOP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
    most = tl.max(x, axis=0)
    at = row * num_tiles + tile
    tl.store(maxima + at, most)
    tl.store(masses + at, tl.sum(tl.where(x > float("-inf"), tl.exp(x - most), 0.0), axis=0))
    if TOP > 0:
        ordered = x.to(tl.int32, bitcast=True)
        ordered = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.int64)
        key = tl.where(token < vocab_size, (ordered << 32) | (0x7FFFFFFF - token).to(tl.int64), _LOWEST)
        for i in range(TOP):
            best = tl.max(key, axis=0)
            tl.store(keys + at * TOP + i, best)
            key = tl.where(key == best, _LOWEST, key)


@triton.jit
def _merge_kernel(
    logits, token_ids, maxima, masses, keys, own, ids, values, vocab_size, num_tiles,
    TILES: tl.constexpr, KEYS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    maximum = tl.load(maxima + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    mass = tl.load(masses + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    most = tl.max(maximum, axis=0)
    shifted = tl.where(maximum > float("-inf"), maximum - most, 0.0)
    total = tl.sum(mass.to(tl.float64) * tl.exp(shifted).to(tl.float64), axis=0)
    log_total = most.to(tl.float64) + tl.log(total)
    chosen = tl.load(logits + row * vocab_size + tl.load(token_ids + row))
    tl.store(own + row, (chosen.to(tl.float64) - log_total).to(tl.float32))
    if TOP > 0:
        slot = tl.arange(0, KEYS)
        key = tl.load(keys + row * num_tiles * TOP + slot, mask=slot < num_tiles * TOP, other=_LOWEST)
        for i in range(TOP):
            best = tl.max(key, axis=0)
            ordered = (best >> 32).to(tl.int32)
            value = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
            tl.store(ids + row * TOP + i, 0x7FFFFFFF - (best & 0x7FFFFFFF))
            tl.store(values + row * TOP + i, (value.to(tl.float64) - log_total).to(tl.float32))
            key = tl.where(key == best, _LOWEST, key)
