"""Exact selection of the best entries of a scanned row; equal scores go to the lower entry."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

# A histogram costs by its bins: each lane of a warp counts a part of them for every value. So digits are short.
NUM_BINS = 1024  # of the scan's histogram
BIN_SHIFT = tl.constexpr(22)  # from a score to its 10 leading bits
_ENTRY_BITS = tl.constexpr(22)  # op.py has the limit on entries
_LAST_ENTRY = tl.constexpr(2**22 - 1)


@triton.jit
def gather_kernel(
    ordered, counts, num_visible, candidates, width, topk,
    BLOCK: tl.constexpr, BINS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """List the entries of a block that are in the bin of the last selected one or above it, in any order of blocks."""
    token = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    visible = tl.minimum(tl.load(num_visible + token).to(tl.int32), width)
    if (visible > topk) & (tl.program_id(0) * BLOCK < visible):
        histogram = tl.load(counts + token * COUNTS + tl.arange(0, BINS))
        bin_, _, _ = _last_bin(histogram, topk)
        score = tl.load(ordered + token * width + entry, mask=entry < visible, other=0)
        is_candidate = (entry < visible) & ((score >> BIN_SHIFT) + BINS // 2 >= bin_)
        place = tl.cumsum(is_candidate.to(tl.int32), axis=0)
        count = tl.sum(is_candidate.to(tl.int32), axis=0)
        start = tl.atomic_add(counts + token * COUNTS + BINS, count, sem="relaxed")
        tl.store(candidates + token * width + start + place - 1, entry, mask=is_candidate)


@triton.jit
def select_kernel(
    ordered, counts, candidates, page_table, seqs, num_visible, slots, lengths, columns, width, topk,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """The slots of one token's best entries, ascending by entry, and how many there are."""
    token = tl.program_id(0).to(tl.int64)
    visible = tl.minimum(tl.load(num_visible + token).to(tl.int32), width)
    length = tl.maximum(tl.minimum(visible, topk), 0)
    out = slots + token * topk
    place = tl.arange(0, WIDTH)
    chosen = place
    if visible > topk:
        row = ordered + token * width
        listed = candidates + token * width
        histogram = tl.load(counts + token * COUNTS + tl.arange(0, BINS))
        count = tl.load(counts + token * COUNTS + BINS)
        bin_, need, inside = _last_bin(histogram, topk)
        prefix = bin_.to(tl.int64)
        limit = prefix << (BIN_SHIFT + _ENTRY_BITS)
        at = (prefix, need, inside, limit)
        at = _narrow(row, listed, count, at[0], at[1], at[2], at[3], 14 + _ENTRY_BITS, 8, BLOCK)
        at = _narrow(row, listed, count, at[0], at[1], at[2], at[3], 7 + _ENTRY_BITS, 7, BLOCK)
        at = _narrow(row, listed, count, at[0], at[1], at[2], at[3], _ENTRY_BITS, 7, BLOCK)
        at = _narrow(row, listed, count, at[0], at[1], at[2], at[3], 14, 8, BLOCK)
        at = _narrow(row, listed, count, at[0], at[1], at[2], at[3], 7, 7, BLOCK)
        at = _narrow(row, listed, count, at[0], at[1], at[2], at[3], 0, 7, BLOCK)
        limit = at[3]
        start = 0
        for first in range(0, count, BLOCK):
            entry, key, is_listed = _load_keys(row, listed, first, count, BLOCK)
            is_chosen = is_listed & (key >= limit)
            rank = start + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
            tl.store(out + rank, entry.to(tl.int64), mask=is_chosen & (rank < topk))
            start += tl.sum(is_chosen.to(tl.int32), axis=0)
        tl.debug_barrier()
        unsorted = tl.load(out + place, mask=place < topk, other=0x7FFFFFFF).to(tl.int32)
        chosen = tl.sort(unsorted)
        tl.debug_barrier()
    is_chosen = place < length
    sequence = tl.where(length > 0, tl.load(seqs + token).to(tl.int64), 0)
    page = tl.load(page_table + sequence * columns + chosen // ROWS, mask=is_chosen, other=0).to(tl.int64)
    tl.store(out + place, tl.where(is_chosen, page * ROWS + chosen % ROWS, -1), mask=place < topk)
    tl.store(lengths + token, length)


@triton.jit
def _narrow(
    row, listed, count, prefix, need, inside, limit, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Refine the threshold by the next BITS bits, unless all of the `inside` keys that begin with prefix are needed."""
    BINS: tl.constexpr = 2**BITS
    if need < inside:
        histogram = tl.zeros((BINS,), tl.int32)
        for first in range(0, count, BLOCK):
            _, key, is_listed = _load_keys(row, listed, first, count, BLOCK)
            digit = ((key >> SHIFT) & (BINS - 1)).to(tl.int32)
            histogram += tl.histogram(digit, BINS, mask=is_listed & ((key >> (SHIFT + BITS)) == prefix))
        bin_, need, inside = _last_bin(histogram, need)
        prefix = (prefix << BITS) | bin_
        limit = prefix << SHIFT
    return prefix, need, inside, limit


@triton.jit
def _load_keys(row, listed, first, count, BLOCK: tl.constexpr):
    """Entries and their keys: the score, then the lower entry, in one non-negative int64 that is unique."""
    place = first + tl.arange(0, BLOCK)
    is_listed = place < count
    entry = tl.load(listed + place, mask=is_listed, other=0)
    score = tl.load(row + entry, mask=is_listed, other=0).to(tl.int64) + 2147483648
    return entry, (score << _ENTRY_BITS) | (entry ^ _LAST_ENTRY).to(tl.int64), is_listed


@triton.jit
def _last_bin(histogram, need):
    """The bin that holds the `need`-th largest. Returns: it, how many of its members are needed, how many it has."""
    bins = tl.arange(0, histogram.shape[0])
    from_here = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram  # members of this bin and above
    bin_ = tl.sum((from_here >= need).to(tl.int32), axis=0) - 1
    inside = tl.sum(tl.where(bins == bin_, histogram, 0), axis=0)
    above = tl.sum(tl.where(bins == bin_, from_here - histogram, 0), axis=0)
    return bin_, need - above, inside
