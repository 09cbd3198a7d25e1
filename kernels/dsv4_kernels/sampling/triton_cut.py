"""Where top_k, top_p and min_p cut a row, in Triton: a search on the bits of scaled logits.

A scaled logit is at most 0, so the bits of its magnitude, read as an integer, order tokens by falling probability. A
cut is the largest such integer that stays, and how many of the tokens with exactly that one do. The search halves the
range of integers; it works on the head of the row in registers, or, when the run of kept tokens is longer, on all of
the row in memory. `count_kernel` and `gather_kernel` collect the head, every tile of the vocabulary in a program of its
own. How long a row's head is depends on that row alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from dsv4_kernels.triton_pdl import wait_for_previous

HEAD = 2048  # tokens that the search holds in registers
BINS = 128  # by distance from the best token, a quarter of a nat each
_BINS_PER_NAT = tl.constexpr(4.0)
_INF_BITS = tl.constexpr(0x7F800000)
_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def scaled_bits(x, most, temperature):
    """|(x - most) / temperature| as integer; IEEE division, as torch divides."""
    return tl.abs(tl.div_rn(x - most, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def limits_of(row, top_k, top_p, min_p, temperature, vocab_size):
    """A row's top_k (vocab_size = none), top_p, min_p, and whether it is to be cut at all."""
    k = vocab_size
    if top_k is not None:
        k = tl.load(top_k + row).to(tl.int32)
    p = tl.load(top_p + row)
    least = 0.0 * p
    if min_p is not None:
        least = tl.load(min_p + row)
    is_cut = (tl.load(temperature + row) > 0) & (((k > 0) & (k < vocab_size)) | (p < 1.0) | (least > 0.0))
    return k, p, least, is_cut


@triton.jit
def count_kernel(
    logits, temperature, top_k, top_p, min_p, maxima, counts, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, STRIP: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """counts[row, tile, bin]: tokens of a tile by their distance from the row's best; STRIP tiles a program."""
    wait_for_previous(USE_PTX)
    row = tl.program_id(0).to(tl.int64)
    _k, _p, _least, is_cut = limits_of(row, top_k, top_p, min_p, temperature, vocab_size)
    if is_cut:
        heat = tl.load(temperature + row)
        most = row_maximum(maxima, row, num_tiles, TILES)
        first_tile = tl.program_id(1) * STRIP
        for tile in range(first_tile, tl.minimum(first_tile + STRIP, num_tiles)):
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
            bins = _bins(scaled_bits(x, most, heat), BINS)
            tl.store(counts + (row * num_tiles + tile) * BINS + tl.arange(0, BINS), tl.histogram(bins, BINS))


@triton.jit
def gather_kernel(
    logits, temperature, top_k, top_p, min_p, maxima, counts, head, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, HEAD: tl.constexpr, STRIP: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """head[row]: the bits of the most probable tokens, whole bins of them, at most HEAD, in the order of their ids."""
    wait_for_previous(USE_PTX)
    row = tl.program_id(0).to(tl.int64)
    _k, _p, _least, is_cut = limits_of(row, top_k, top_p, min_p, temperature, vocab_size)
    if is_cut:
        heat = tl.load(temperature + row)
        most = row_maximum(maxima, row, num_tiles, TILES)
        first_tile = tl.program_id(1) * STRIP
        num_bins, first, _total = _head_of(counts, row, first_tile, num_tiles, TILES, BINS, HEAD)
        for tile in range(first_tile, tl.minimum(first_tile + STRIP, num_tiles)):
            token = tile * TILE + tl.arange(0, TILE)
            x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
            bits = scaled_bits(x, most, heat)
            is_head = (_bins(bits, BINS) < num_bins).to(tl.int32)
            tl.store(head + row * HEAD + first + tl.cumsum(is_head, axis=0) - 1, bits, mask=is_head != 0)
            first += tl.sum(is_head, axis=0)


@triton.jit
def row_maximum(maxima, row, num_tiles, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(maxima + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")), axis=0)


@triton.jit
def _head_of(counts, row, tile, num_tiles, TILES: tl.constexpr, BINS: tl.constexpr, HEAD: tl.constexpr):
    """Bins that the head takes, its tokens in tiles before `tile`, and in all."""
    tiles, bins = tl.arange(0, TILES)[:, None], tl.arange(0, BINS)[None, :]
    count = tl.load(counts + (row * num_tiles + tiles) * BINS + bins, mask=tiles < num_tiles, other=0)
    upto = tl.cumsum(tl.sum(count, axis=0), axis=0)
    # The last bin holds everything farther away.
    num_bins = tl.sum(((upto <= HEAD) & (tl.arange(0, BINS) < BINS - 1)).to(tl.int32), axis=0)
    count = tl.where(bins < num_bins, count, 0)
    before = tl.sum(tl.sum(tl.where(tiles < tile, count, 0), axis=1), axis=0)
    return num_bins, before, tl.sum(tl.sum(count, axis=1), axis=0)


@triton.jit
def _bins(bits, BINS: tl.constexpr):
    return tl.minimum(bits.to(tl.float32, bitcast=True) * _BINS_PER_NAT, BINS - 1.0).to(tl.int32)


@triton.jit
def find_cut(
    logits, head, counts, row, vocab_size, num_tiles, most, total, temperature, top_k, top_p, min_p,
    TILE: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """total: sum of exp of the row's scaled logits, fp64.

    Returns: (bits, last id among those with exactly these bits) of the last token that stays.
    """
    has_k = (top_k > 0) & (top_k < vocab_size)
    has_p = top_p < 1.0
    x = logits + row * vocab_size
    _num_bins, _before, num_head = _head_of(counts, row, 0, num_tiles, TILES, BINS, HEAD)
    slot = tl.arange(0, HEAD)
    bits = tl.load(head + row * HEAD + slot, mask=slot < num_head, other=_INF_BITS)
    mass = tl.exp(-(bits.to(tl.float32, bitcast=True))).to(tl.float64)
    in_head = tl.where(has_k, top_k <= num_head, tl.sum(mass, axis=0) >= top_p * total)
    if in_head | ((not has_k) & (not has_p)):
        limit, ties = _search(
            bits, mass, x, vocab_size, most, total, temperature, top_k, has_k, top_p, has_p, TILE, True
        )
    else:
        limit, ties = _search(
            bits, mass, x, vocab_size, most, total, temperature, top_k, has_k, top_p, has_p, TILE, False
        )
    if min_p > 0.0:
        floor = (-tl.log(min_p.to(tl.float64))).to(tl.float32)
        floor_bits = tl.abs(floor).to(tl.int32, bitcast=True)
        ties = tl.where(floor_bits < limit, _ALL, ties)
        limit = tl.minimum(limit, floor_bits)
    last_id = vocab_size
    if ties != _ALL:
        # All of the head's tokens with these bits may stay: then no id has to be found.
        num_tied = tl.sum((bits == limit).to(tl.int32), axis=0)
        if (not in_head) | (num_tied > ties):
            last_id = _id_of_tie(x, vocab_size, most, temperature, limit, ties, TILE)
    return limit, last_id


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
