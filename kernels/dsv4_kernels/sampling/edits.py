"""Changes of single logits before temperature: bias, bans, grammar masks, penalties. All of them work in place."""

import torch

_WORD_BITS = 32


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """logits[rows, token_ids] += bias; see op.py for shapes."""
    logits[rows, token_ids] += bias


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Ban what the bitmask does not allow; see op.py for shapes."""
    bits = torch.arange(_WORD_BITS, device=bitmask.device, dtype=torch.int32)
    allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)  # [M, 32 * W]
    vocab_size = logits.shape[-1]
    missing = vocab_size - allowed.shape[-1]
    if missing > 0:
        allowed = torch.nn.functional.pad(allowed, (0, missing), value=False)
    logits[rows] = logits[rows].masked_fill(~allowed[:, :vocab_size], float("-inf"))


def ban_tokens(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, masked_rows: torch.Tensor | None
) -> None:
    """Set single logits to -inf; see op.py for shapes and for the exception of masked rows."""
    before = logits[rows, token_ids]
    logits[rows, token_ids] = float("-inf")
    if masked_rows is None:
        return
    is_empty = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    is_empty[masked_rows] = torch.isneginf(logits[masked_rows]).all(dim=-1)
    logits[rows, token_ids] = before.masked_fill_(~is_empty[rows], float("-inf"))


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Repetition, then frequency and presence, on the tokens seen so far; see op.py for shapes."""
    presence, frequency, repetition = penalties.unbind(-1)  # [N] each
    seen = logits[rows, token_ids]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits[rows, token_ids] = seen - frequency * counts - presence * (counts > 0)
