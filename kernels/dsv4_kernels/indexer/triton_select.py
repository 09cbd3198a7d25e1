"""Exact selection of the best entries of a scanned row; equal scores go to the lower entry.

A bound comes first: entries are dealt to `PARTS` parts, and the `topk`-th largest of the parts' maxima is a score that
at least `topk` entries reach. Few more do, and they are found through the maxima of their groups. Whatever is listed on
the way stays in the order of entries, so nothing is sorted and ties need no key of their own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from dsv4_kernels.triton_pdl import wait_for_previous

GROUP = tl.constexpr(16)  # neighbouring entries with one maximum
LOWEST = tl.constexpr(-(2**31))  # an ordered score below all others: no entry


@triton.jit
def select_kernel(
    scores, maxima, groups, candidates, page_table, seqs, num_visible, slots, lengths, columns, width, stride, topk,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """The slots of one token's best entries, ascending by entry, and how many there are.

    scores: [T, width] int32, ordered. maxima: [T, stride] of their groups. groups, candidates: scratch as large.
    PARTS >= topk; the parts take the groups in turn, SPAN loads at once.
    """
    token = tl.program_id(0).to(tl.int64)
    visible = tl.minimum(tl.load(num_visible + token).to(tl.int32), width)
    sequence = tl.maximum(tl.load(seqs + token), 0).to(tl.int64)
    pages = page_table + sequence * columns
    out = slots + token * topk
    wait_for_previous(USE_PTX)
    if visible > topk:
        scores += token * width
        candidates += token * width
        maxima += token * stride
        groups += token * stride
        low = _bound(maxima, tl.cdiv(visible, GROUP), topk, PARTS, SPAN)
        num_groups = _list_groups(maxima, groups, tl.cdiv(visible, GROUP), low, BLOCK)
        tl.debug_barrier()
        count = _list_entries(scores, groups, candidates, num_groups, visible, low, BLOCK)
        tl.debug_barrier()
        low, above = _threshold(scores, candidates, count, low, topk, HELD)
        ties = topk - above
        start = 0
        for first in range(0, count, HELD):
            entry, score, is_listed = _load_listed(scores, candidates, first, count, HELD)
            is_tie = is_listed & (score == low)
            tie = tl.cumsum(is_tie.to(tl.int32), axis=0)
            chosen = (is_listed & (score > low)) | (is_tie & (tie <= ties))
            ties -= tl.sum(is_tie.to(tl.int32), axis=0)
            rank = start + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            start += tl.sum(chosen.to(tl.int32), axis=0)
            page = tl.load(pages + entry // ROWS, mask=chosen, other=0).to(tl.int64)
            tl.store(out + rank, page * ROWS + entry % ROWS, mask=chosen)
        tl.store(lengths + token, topk)
    else:
        entry = tl.arange(0, WIDTH)
        page = tl.load(pages + entry // ROWS, mask=entry < visible, other=0).to(tl.int64)
        tl.store(out + entry, tl.where(entry < visible, page * ROWS + entry % ROWS, -1), mask=entry < topk)
        tl.store(lengths + token, tl.maximum(visible, 0))


@triton.jit
def _bound(maxima, num_groups, topk, PARTS: tl.constexpr, SPAN: tl.constexpr):
    """A score that at least topk entries reach, and not many more; the lowest one where parts are too few."""
    part = tl.arange(0, PARTS)
    parts = tl.full((PARTS,), LOWEST, tl.int32)
    for first in range(0, num_groups, PARTS * SPAN):
        for step in tl.static_range(SPAN):
            group = first + step * PARTS + part
            parts = tl.maximum(parts, _load_maxima(maxima, group, num_groups))
    count = tl.sum((parts > LOWEST).to(tl.int32), axis=0)
    low = tl.full((), LOWEST, tl.int64)
    if count >= topk:
        low = tl.min(tl.where(parts > LOWEST, parts, 0x7FFFFFFF), axis=0).to(tl.int64)
        high = tl.max(parts, axis=0).to(tl.int64) + 1
        while (count > topk + topk // 8) & (high - low > 1):
            middle = low + (high - low) // 2
            reached = tl.sum((parts >= middle.to(tl.int32)).to(tl.int32), axis=0)
            is_bound = reached >= topk
            low = tl.where(is_bound, middle, low)
            count = tl.where(is_bound, reached, count)
            high = tl.where(is_bound, high, middle)
    return low.to(tl.int32)


@triton.jit
def _load_maxima(maxima, group, num_groups):
    """Rows are multiples of 16, and so is the mask, for wide loads."""
    value = tl.load(maxima + group, mask=group < tl.cdiv(num_groups, 16) * 16, other=LOWEST)
    return tl.where(group < num_groups, value, LOWEST)


@triton.jit
def _list_groups(maxima, groups, num_groups, low, BLOCK: tl.constexpr):
    """List the groups that hold an entry of at least `low`. Returns: their number."""
    start = 0
    for first in range(0, num_groups, BLOCK):
        group = first + tl.arange(0, BLOCK)
        is_listed = (group < num_groups) & (_load_maxima(maxima, group, num_groups) >= low)
        rank = start + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        tl.store(groups + rank, group, mask=is_listed)
        start += tl.sum(is_listed.to(tl.int32), axis=0)
    return start


@triton.jit
def _list_entries(scores, groups, candidates, num_groups, visible, low, BLOCK: tl.constexpr):
    """List the entries of at least `low` of the listed groups. Returns: their number."""
    start = 0
    for first in range(0, num_groups * GROUP, BLOCK):
        place = first + tl.arange(0, BLOCK)
        is_entry = place < num_groups * GROUP
        entry = tl.load(groups + place // GROUP, mask=is_entry, other=0) * GROUP + place % GROUP
        is_entry &= entry < visible
        score = tl.load(scores + entry, mask=is_entry, other=LOWEST)
        is_listed = is_entry & (score >= low)
        rank = start + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
        tl.store(candidates + rank, entry, mask=is_listed)
        start += tl.sum(is_listed.to(tl.int32), axis=0)
    return start


@triton.jit
def _threshold(scores, candidates, count, bound, topk, HELD: tl.constexpr):
    """The largest score found that topk of the `count` candidates reach, and how many are above it: at most topk."""
    _entry, held, is_held = _load_listed(scores, candidates, 0, count, HELD)
    low = bound.to(tl.int64)
    high = tl.max(held, axis=0).to(tl.int64) + 1
    for first in range(HELD, count, HELD):
        _entry, score, is_listed = _load_listed(scores, candidates, first, count, HELD)
        high = tl.maximum(high, tl.max(score, axis=0).to(tl.int64) + 1)
    reached = count
    while (reached != topk) & (high - low > 1):
        middle = low + (high - low) // 2
        here = _count(scores, candidates, held, is_held, count, middle.to(tl.int32), HELD)
        is_low = here >= topk
        low = tl.where(is_low, middle, low)
        reached = tl.where(is_low, here, reached)
        high = tl.where(is_low, high, middle)
    threshold = low.to(tl.int32)
    ties = tl.sum((is_held & (held == threshold)).to(tl.int32), axis=0)
    for first in range(HELD, count, HELD):
        _entry, score, is_listed = _load_listed(scores, candidates, first, count, HELD)
        ties += tl.sum((is_listed & (score == threshold)).to(tl.int32), axis=0)
    return threshold, reached - ties


@triton.jit
def _count(scores, candidates, held, is_held, count, least, HELD: tl.constexpr):
    """How many candidates reach `least`; the first HELD are in registers."""
    reached = tl.sum((is_held & (held >= least)).to(tl.int32), axis=0)
    for first in range(HELD, count, HELD):
        _entry, score, is_listed = _load_listed(scores, candidates, first, count, HELD)
        reached += tl.sum((is_listed & (score >= least)).to(tl.int32), axis=0)
    return reached


@triton.jit
def _load_listed(scores, candidates, first, count, HELD: tl.constexpr):
    place = first + tl.arange(0, HELD)
    is_listed = place < count
    entry = tl.load(candidates + place, mask=is_listed, other=0)
    score = tl.load(scores + entry, mask=is_listed, other=LOWEST)
    return entry, score, is_listed
