"""Where top_k, top_p and min_p cut a row, in Triton: one program per row, a search on the bits of scaled logits.

A scaled logit is at most 0, so the bits of its magnitude, read as an integer, order tokens by falling probability. A
cut is the largest such integer that stays, and how many of the tokens with exactly that one do. The search halves the
range of integers; it works on the head of the row in registers, or, when the run of kept tokens is longer, on all of
the row in memory. How long a row's head is depends on that row alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

HEAD = 2048  # tokens that the search holds in registers
_BINS = tl.constexpr(256)
_BINS_PER_NAT = tl.constexpr(8.0)
_INF_BITS = tl.constexpr(0x7F800000)
_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def scaled_bits(x, most, temperature):
    """|(x - most) / temperature| as integer; IEEE division, as torch divides."""
    return tl.abs(tl.div_rn(x - most, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def find_cut(
    row, head, vocab_size, most, total, temperature, top_k, top_p, min_p, TILE: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """row: pointer to logits. head: pointer to HEAD int32 of scratch. total: sum of exp of scaled logits, fp64.

    Returns: (bits, last id among those with exactly these bits) of the last token that stays.
    """
    has_k = (top_k > 0) & (top_k < vocab_size)
    has_p = top_p < 1.0
    num_head = _gather_head(row, head, vocab_size, most, temperature, TILE, HEAD)
    tl.debug_barrier()  # other threads of the program read what this one stored
    slot = tl.arange(0, HEAD)
    bits = tl.load(head + slot, mask=slot < num_head, other=_INF_BITS)
    mass = tl.exp(-(bits.to(tl.float32, bitcast=True))).to(tl.float64)
    in_head = tl.where(has_k, top_k <= num_head, tl.sum(mass, axis=0) >= top_p * total)
    if in_head | ((not has_k) & (not has_p)):
        limit, ties = _search(
            bits, mass, row, vocab_size, most, total, temperature, top_k, has_k, top_p, has_p, TILE, True
        )
    else:
        limit, ties = _search(
            bits, mass, row, vocab_size, most, total, temperature, top_k, has_k, top_p, has_p, TILE, False
        )
    if min_p > 0.0:
        floor = (-tl.log(min_p.to(tl.float64))).to(tl.float32)
        floor_bits = tl.abs(floor).to(tl.int32, bitcast=True)
        ties = tl.where(floor_bits < limit, _ALL, ties)
        limit = tl.minimum(limit, floor_bits)
    last_id = vocab_size
    if ties != _ALL:
        last_id = _id_of_tie(row, vocab_size, most, temperature, limit, ties, TILE)
    return limit, last_id


@triton.jit
def _gather_head(row, head, vocab_size, most, temperature, TILE: tl.constexpr, HEAD: tl.constexpr):
    """Store the bits of the most probable tokens, whole bins of them, at most HEAD, in the order of their ids."""
    counts = tl.zeros((_BINS,), tl.int32)
    for first in range(0, vocab_size, TILE):
        bins = _bins(row, first, vocab_size, most, temperature, TILE)
        counts += tl.histogram(bins, _BINS)
    upto = tl.cumsum(counts, axis=0)
    fits = (upto <= HEAD) & (tl.arange(0, _BINS) < _BINS - 1)  # the last bin holds everything farther away
    num_bins = tl.sum(fits.to(tl.int32), axis=0)
    stored = 0
    for first in range(0, vocab_size, TILE):
        is_head = (_bins(row, first, vocab_size, most, temperature, TILE) < num_bins).to(tl.int32)
        token = first + tl.arange(0, TILE)
        x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        to = stored + tl.cumsum(is_head, axis=0) - 1
        tl.store(head + to, scaled_bits(x, most, temperature), mask=is_head != 0)
        stored += tl.sum(is_head, axis=0)
    return stored


@triton.jit
def _bins(row, first, vocab_size, most, temperature, TILE: tl.constexpr):
    token = first + tl.arange(0, TILE)
    x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
    distance = scaled_bits(x, most, temperature).to(tl.float32, bitcast=True) * _BINS_PER_NAT
    return tl.minimum(distance, _BINS - 1.0).to(tl.int32)


@triton.jit
def _search(
    bits, mass, row, vocab_size, most, total, temperature, top_k, has_k, top_p, has_p, TILE: tl.constexpr,
    IN_HEAD: tl.constexpr,
):  # fmt: skip
    limit = _INF_BITS + 0 * vocab_size
    ties = _ALL + 0 * vocab_size
    if has_k:
        low = 0 * vocab_size
        while low < limit:  # the smallest limit that keeps at least top_k
            middle = low + (limit - low) // 2
            count, _ = _measure(bits, mass, row, vocab_size, most, temperature, middle, TILE, IN_HEAD)
            low = tl.where(count >= top_k, low, middle + 1)
            limit = tl.where(count >= top_k, middle, limit)
        count, before = _measure(bits, mass, row, vocab_size, most, temperature, limit - 1, TILE, IN_HEAD)
        ties = top_k - count
        total = before + ties.to(tl.float64) * _mass_of(limit)
    if has_p:
        goal = top_p.to(tl.float64) * total
        low = 0 * vocab_size
        high = limit
        while low < high:  # the smallest limit whose mass reaches the goal
            middle = low + (high - low) // 2
            _, reached = _measure(bits, mass, row, vocab_size, most, temperature, middle, TILE, IN_HEAD)
            low = tl.where(reached >= goal, low, middle + 1)
            high = tl.where(reached >= goal, middle, high)
        _, before = _measure(bits, mass, row, vocab_size, most, temperature, high - 1, TILE, IN_HEAD)
        wanted = tl.minimum(tl.maximum(tl.ceil((goal - before) / _mass_of(high)), 1.0), 2.0**30).to(tl.int32)
        ties = tl.where(high < limit, wanted, tl.minimum(ties, wanted))
        limit = high
    return limit, ties


@triton.jit
def _mass_of(bits):
    """exp of minus the number with these bits, in fp64; positive, also where fp32 would give 0."""
    return tl.maximum(tl.exp(-(bits.to(tl.float32, bitcast=True))), 2.0**-126).to(tl.float64)


@triton.jit
def _measure(bits, mass, row, vocab_size, most, temperature, limit, TILE: tl.constexpr, IN_HEAD: tl.constexpr):
    """How many tokens have bits of at most `limit`, and their mass in fp64."""
    if IN_HEAD:
        count = tl.sum((bits <= limit).to(tl.int32), axis=0)
        reached = tl.sum(tl.where(bits <= limit, mass, 0.0), axis=0)
    else:
        count = 0 * vocab_size
        reached = (0.0 * temperature).to(tl.float64)
        for first in range(0, vocab_size, TILE):
            token = first + tl.arange(0, TILE)
            x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
            own = scaled_bits(x, most, temperature)
            is_kept = (own <= limit) & (token < vocab_size)
            count += tl.sum(is_kept.to(tl.int32), axis=0)
            weight = tl.exp(-(own.to(tl.float32, bitcast=True))).to(tl.float64)
            reached += tl.sum(tl.where(is_kept, weight, 0.0), axis=0)
    return count, reached


@triton.jit
def _id_of_tie(row, vocab_size, most, temperature, limit, ties, TILE: tl.constexpr):
    """Id of the token that is number `ties` among those with bits `limit`; vocab_size when there are no more."""
    last_id = vocab_size
    seen = 0 * vocab_size
    for first in range(0, vocab_size, TILE):
        token = first + tl.arange(0, TILE)
        x = tl.load(row + token, mask=token < vocab_size, other=float("-inf"))
        is_tied = ((scaled_bits(x, most, temperature) == limit) & (token < vocab_size)).to(tl.int32)
        number = seen + tl.cumsum(is_tied, axis=0)
        here = tl.min(tl.where((is_tied != 0) & (number == ties), token, vocab_size), axis=0)
        last_id = tl.minimum(last_id, here)
        seen += tl.sum(is_tied, axis=0)
    return last_id
