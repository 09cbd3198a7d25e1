"""Edits of single logits in Triton. A row or token outside the logits names nothing: lists can be padded."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

_BLOCK = 256
_TILE = 4096  # tokens of a masked row per program


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    _edit(logits, rows, token_ids, bias, None, None, "bias")


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    _edit(logits, rows, token_ids, counts, penalties.contiguous(), None, "penalties")


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    if rows.shape[0] == 0:
        return
    num_rows, vocab_size = logits.shape
    _bitmask_kernel[(rows.shape[0], triton.cdiv(vocab_size, _TILE))](
        logits, rows, bitmask.contiguous(), num_rows, vocab_size, bitmask.shape[1], TILE=_TILE, num_warps=4
    )


def ban_tokens(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, masked_rows: torch.Tensor | None
) -> None:
    """Set, look whether a masked row has lost its last token, and put back in that case."""
    saved = torch.empty_like(rows, dtype=torch.float32)
    _edit(logits, rows, token_ids, saved, None, None, "ban")
    if masked_rows is None or masked_rows.shape[0] == 0 or rows.shape[0] == 0:
        return
    num_rows, vocab_size = logits.shape
    has_token = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    is_masked = torch.zeros_like(has_token)
    _scan_kernel[(masked_rows.shape[0], triton.cdiv(vocab_size, _TILE))](
        logits, masked_rows, has_token, is_masked, num_rows, vocab_size, TILE=_TILE, num_warps=4
    )
    _edit(logits, rows, token_ids, saved, is_masked, has_token, "restore")


def _edit(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    values: torch.Tensor,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
    what: str,
) -> None:
    """first: penalties, or which rows are masked. second: which of those have a token left."""
    assert logits.is_contiguous(), logits.stride()
    if rows.shape[0]:
        num_rows, vocab_size = logits.shape
        _edit_kernel[(triton.cdiv(rows.shape[0], _BLOCK),)](
            logits, rows.contiguous(), token_ids.contiguous(), values.contiguous(), first, second, rows.shape[0],
            num_rows, vocab_size, WHAT=what, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def _edit_kernel(
    logits, rows, token_ids, values, first, second, num_edits, num_rows, vocab_size,
    WHAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + edit, mask=edit < num_edits, other=-1).to(tl.int64)
    token = tl.load(token_ids + edit, mask=edit < num_edits, other=-1).to(tl.int64)
    is_edit = (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocab_size)
    at = logits + row * vocab_size + token
    x = tl.load(at, mask=is_edit, other=0.0)
    if WHAT == "ban":
        tl.store(values + edit, x, mask=edit < num_edits)
        x = tl.full((BLOCK,), float("-inf"), tl.float32)
    else:
        value = tl.load(values + edit, mask=is_edit, other=0.0)
        if WHAT == "bias":
            x += value
        elif WHAT == "restore":
            is_edit &= tl.load(first + row, mask=is_edit, other=0) != 0
            is_edit &= tl.load(second + row, mask=is_edit, other=1) == 0
            x = value
        else:
            presence = tl.load(first + 3 * edit, mask=is_edit, other=0.0)
            frequency = tl.load(first + 3 * edit + 1, mask=is_edit, other=0.0)
            repetition = tl.load(first + 3 * edit + 2, mask=is_edit, other=1.0)
            x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
            x = x - frequency * value - tl.where(value > 0, presence, 0.0)
    tl.store(at, x, mask=is_edit)


@triton.jit
def _bitmask_kernel(logits, rows, bitmask, num_rows, vocab_size, num_words, TILE: tl.constexpr):
    mask_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask_row).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = token // 32
    words = tl.load(bitmask + mask_row * num_words + word, mask=word < num_words, other=0)
    is_banned = ((words >> (token % 32)) & 1) == 0
    is_row = (row >= 0) & (row < num_rows)
    at = logits + row * vocab_size + token
    tl.store(at, tl.full((TILE,), float("-inf"), tl.float32), mask=is_banned & is_row & (token < vocab_size))


@triton.jit
def _scan_kernel(logits, masked_rows, has_token, is_masked, num_rows, vocab_size, TILE: tl.constexpr):
    row = tl.load(masked_rows + tl.program_id(0)).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if (row >= 0) & (row < num_rows):
        x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
        tl.atomic_max(has_token + row, tl.max((x != float("-inf")).to(tl.int32), axis=0), sem="relaxed")
        tl.store(is_masked + row, 1)
