"""Sampling in Triton, six launches without a host sync, whatever the rows ask for.

1. per row and tile of the vocabulary: maximum, its id, sum of exp; 2. to 4. the cut of top_k, top_p and min_p
(`triton_cut.py`), over at once for rows without; 5. per row and span of tiles: the best logit plus noise among what is
left; 6. per row: the best span. The two logarithms of the noise are taken only for tokens that can still win: noise
with uniform u exceeds n only if u <= exp(-n), which costs one exp2. Tokens are those of the reference, bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from dsv4_kernels.sampling import reference
from dsv4_kernels.sampling.triton_cut import BINS, HEAD, count_kernel, find_cut, gather_kernel, limits_of, scaled_bits
from dsv4_kernels.sampling.triton_edits import add_bias, apply_bitmask, apply_penalties, ban_tokens
from dsv4_kernels.sampling.triton_logprobs import token_logprobs
from dsv4_kernels.sampling.triton_noise import gumbel, noise_bits, noise_bits_from, noise_state
from dsv4_kernels.triton_pdl import uses_ptx, wait_for_previous

__all__ = [
    "add_bias",
    "apply_bitmask",
    "apply_penalties",
    "ban_tokens",
    "gumbel_noise",
    "sample",
    "token_logprobs",
    "verify_drafts",
]

_TILE = 4096  # tokens of one program of the first pass
_PASS_TILE = 2048  # tokens that a pass over a whole row takes at once; more of them spill
_NOISE_TILE = 1024  # tokens whose noise is formed together
_STRIP_TILES = 8  # tiles of one program that collects heads: one without a cut ends at once, and there are few of them
_SPAN_TILES = 16  # noise tiles of one program: the later ones profit from the best of the earlier ones
_CHOOSE_REGISTERS = 64  # eight programs per multiprocessor: those of 128 rows all run at once
_FEW_ROWS = 16  # up to here a program takes one tile: the chip is not full otherwise

_LOWEST = tl.constexpr(-(2**63))
_INF_BITS = tl.constexpr(0x7F800000)
_ONE_BITS = tl.constexpr(0x3F800000)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MOST_NOISE = tl.constexpr(34.0)  # in powers of two: u is at least 2^-33
_MARGIN = tl.constexpr(1.0 + 1e-4)  # of a bound on u: roundings of quotient, exp2, noise and sum come to 3e-5

verify_drafts = reference.verify_drafts  # a handful of integers; no sync in torch's form either


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    noise = torch.empty(seeds.shape[0], vocab_size, dtype=torch.float32, device=seeds.device)
    if noise.numel():
        grid = (seeds.shape[0], triton.cdiv(vocab_size, _NOISE_TILE))
        _noise_kernel[grid](seeds, positions, noise, vocab_size, TILE=_NOISE_TILE, num_warps=4)
    return noise


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
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    logits = logits.contiguous()
    num_tiles = triton.cdiv(vocab_size, _TILE)
    maxima = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    masses = torch.empty_like(maxima)
    best_ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    pdl = {"USE_PTX": uses_ptx(logits), "launch_pdl": uses_ptx(logits)}
    _tile_kernel[(num_rows, num_tiles)](
        logits, temperature, maxima, best_ids, masses, vocab_size, num_tiles, TILE=_TILE, num_warps=4, **pdl
    )
    row_most = torch.empty(num_rows, dtype=torch.float32, device=device)
    row_best = torch.empty(num_rows, dtype=torch.int32, device=device)
    cuts = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    head = torch.empty(num_rows, HEAD, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, num_tiles, BINS, dtype=torch.int32, device=device)
    tiles = {"TILE": _TILE, "TILES": triton.next_power_of_2(num_tiles)}
    strip = 1 if num_rows <= _FEW_ROWS else _STRIP_TILES
    grid, limits = (num_rows, triton.cdiv(num_tiles, strip)), (temperature, top_k, top_p, min_p, maxima, counts)
    options = {"BINS": BINS, "STRIP": strip, "num_warps": 4} | tiles | pdl
    count_kernel[grid](logits, *limits, vocab_size, num_tiles, **options)
    gather_kernel[grid](logits, *limits, head, vocab_size, num_tiles, HEAD=HEAD, **options)
    _cut_kernel[(num_rows,)](
        logits, temperature, top_k, top_p, min_p, maxima, best_ids, masses, counts, head, row_most, row_best, cuts,
        vocab_size, num_tiles, BINS=BINS, HEAD=HEAD, TILE=_PASS_TILE, TILES=tiles["TILES"], num_warps=4, **pdl,
    )  # fmt: skip
    span_tiles = 1 if num_rows <= _FEW_ROWS else _SPAN_TILES  # the best of all spans does not depend on it
    num_spans = triton.cdiv(vocab_size, _NOISE_TILE * span_tiles)
    keys = torch.empty(num_rows, num_spans, dtype=torch.int64, device=device)
    _choose_kernel[(num_rows, num_spans)](
        logits, temperature, seeds, positions, maxima, row_most, row_best, cuts, keys, vocab_size, num_tiles, num_spans,
        TILE=_NOISE_TILE, TILES=span_tiles, MAXIMA=max(1, span_tiles * _NOISE_TILE // _TILE), MAXIMUM_TILE=_TILE,
        num_warps=4, maxnreg=_CHOOSE_REGISTERS, **pdl,
    )  # fmt: skip
    _finish_kernel[(num_rows,)](
        keys, temperature, row_best, token_ids, num_spans, SPANS=triton.next_power_of_2(num_spans), num_warps=1, **pdl
    )
    return token_ids


@triton.jit
def _noise_kernel(seeds, positions, noise, vocab_size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    state = noise_state(tl.load(seeds + row), tl.load(positions + row))
    tl.store(noise + row * vocab_size + token, gumbel(noise_bits(state, token.to(tl.int64))), mask=token < vocab_size)


@triton.jit
def _tile_kernel(
    logits, temperature, maxima, best_ids, masses, vocab_size, num_tiles, TILE: tl.constexpr, USE_PTX: tl.constexpr
):  # fmt: skip
    wait_for_previous(USE_PTX)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
    most = tl.max(x, axis=0)
    at = row * num_tiles + tile
    tl.store(maxima + at, most)
    tl.store(best_ids + at, tl.min(tl.where(x == most, token, vocab_size), axis=0))
    heat = tl.load(temperature + row)
    if heat > 0:
        weight = tl.exp((x - most) / heat)
        tl.store(masses + at, tl.sum(tl.where(x > float("-inf"), weight, 0.0), axis=0))


@triton.jit
def _cut_kernel(
    logits, temperature, top_k, top_p, min_p, maxima, best_ids, masses, counts, head, row_most, row_best, cuts,
    vocab_size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, HEAD: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    wait_for_previous(USE_PTX)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    at = row * num_tiles + tile
    maximum = tl.load(maxima + at, mask=tile < num_tiles, other=float("-inf"))
    most = tl.max(maximum, axis=0)
    best = tl.load(best_ids + at, mask=(tile < num_tiles) & (maximum == most), other=2**31 - 1)
    tl.store(row_most + row, most)
    tl.store(row_best + row, tl.minimum(tl.min(best, axis=0), vocab_size - 1))  # a row of NaN has no best token
    limit = _INF_BITS + 0 * vocab_size
    last_id = vocab_size
    k, p, least, is_cut = limits_of(row, top_k, top_p, min_p, temperature, vocab_size)
    if is_cut:
        heat = tl.load(temperature + row)
        mass = tl.load(masses + at, mask=(tile < num_tiles) & (maximum > float("-inf")), other=0.0)
        shift = tl.where(maximum > float("-inf"), (maximum - most) / heat, 0.0)
        total = tl.sum((mass * tl.exp(shift)).to(tl.float64), axis=0)
        limit, last_id = find_cut(
            logits, head, counts, row, vocab_size, num_tiles, most, total, heat, k, p, least, TILE, TILES, BINS, HEAD
        )
    tl.store(cuts + row * 2, limit)
    tl.store(cuts + row * 2 + 1, last_id)


@triton.jit
def _choose_kernel(
    logits, temperature, seeds, positions, maxima, row_most, row_best, cuts, keys, vocab_size, num_tiles, num_spans,
    TILE: tl.constexpr, TILES: tl.constexpr, MAXIMA: tl.constexpr, MAXIMUM_TILE: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """keys[row, span]: the best sum of scaled logit and noise in order-preserving bits, then the lower id.

    Noise of uniform u is at most -log(u), so a token can win only if u <= exp(scaled - best). That is tested for all
    tokens with a rounded quotient and 23 bits of u, and in tiles where one passes again with the exact cut; then the
    most promising ones take the two logarithms, one after the other, until none can win that is left.
    """
    wait_for_previous(USE_PTX)
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat > 0:
        most = tl.load(row_most + row)
        limit, last_id = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
        state = noise_state(tl.load(seeds + row), tl.load(positions + row))
        # The most probable token always stays, and its sum is one that the winner reaches.
        best = gumbel(noise_bits(state, tl.load(row_best + row).to(tl.int64)))
        key = _LOWEST + 0 * row
        slope = tl.minimum(tl.div_rn(_LOG2_E + 0.0 * heat, heat), 3e38)
        kept = -limit.to(tl.float32, bitcast=True) * (_LOG2_E * (1.0 + 1e-5)) - 1e-30
        tile = span * TILES * TILE // MAXIMUM_TILE + tl.arange(0, MAXIMA)
        maximum = tl.load(maxima + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
        highest = (tl.max(maximum, axis=0) - most) * slope
        num_steps = tl.where(highest >= tl.maximum(kept, best * _LOG2_E - _MOST_NOISE), TILES, 0)
        for step in range(num_steps):
            first = (span * TILES + step) * TILE
            lane = tl.arange(0, TILE)
            token = first + lane
            x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
            bits = noise_bits_from(state, first, lane)
            near = (x - most) * slope  # of the scaled logit, in powers of two; a NaN passes no test
            goal = best * _LOG2_E
            one_and_u = ((bits >> 9).to(tl.int32) | _ONE_BITS).to(tl.float32, bitcast=True)
            can_win = one_and_u <= tl.exp2(near - goal) * _MARGIN + 1.0
            can_win = can_win & (near >= tl.maximum(kept, goal - _MOST_NOISE))
            if tl.max(can_win.to(tl.int32), axis=0) != 0:
                own = scaled_bits(x, most, heat)
                can_win = can_win & (token < vocab_size) & ((own < limit) | ((own == limit) & (token <= last_id)))
                ratio = tl.where(can_win, (one_and_u - 1.0) * tl.exp2(-near), float("inf"))  # u over exp(scaled)
                least = tl.min(ratio, axis=0)
                while least <= tl.exp2(-best * _LOG2_E) * _MARGIN:
                    picked = tl.min(tl.where(ratio == least, token, vocab_size), axis=0)
                    scaled = tl.abs(tl.div_rn(tl.load(logits + row * vocab_size + picked) - most, heat))
                    value = gumbel(noise_bits(state, picked.to(tl.int64))) - scaled
                    ordered = value.to(tl.int32, bitcast=True)
                    ordered = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.int64)
                    key = tl.maximum(key, (ordered << 32) | (0x7FFFFFFF - picked).to(tl.int64))
                    best = tl.maximum(best, value)
                    ratio = tl.where(token == picked, float("inf"), ratio)
                    least = tl.min(ratio, axis=0)
        tl.store(keys + row * num_spans + span, key)


@triton.jit
def _finish_kernel(keys, temperature, row_best, token_ids, num_spans, SPANS: tl.constexpr, USE_PTX: tl.constexpr):
    wait_for_previous(USE_PTX)
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    token = tl.load(row_best + row).to(tl.int64)
    if tl.load(temperature + row) > 0:
        key = tl.max(tl.load(keys + row * num_spans + span, mask=span < num_spans, other=_LOWEST), axis=0)
        token = tl.where(key == _LOWEST, token, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(token_ids + row, token)
