"""Packed masks: one bit per token id in int32 words, bit i % 32 of word i // 32, 1 = allowed; unused bits are 0.

They are numpy arrays, so that a process without torch can use grammars; `torch.from_numpy` shares their memory.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

PackedMask = npt.NDArray[np.int32]  # [num_words]
_WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Words that hold one bit per token."""
    return -(-vocab_size // _WORD_BITS)


def pack(token_ids: Iterable[int], vocab_size: int) -> PackedMask:
    """A read-only mask that allows exactly these tokens."""
    bits = np.zeros(num_words(vocab_size) * _WORD_BITS, dtype=np.uint8)
    bits[list(token_ids)] = 1
    packed = np.packbits(bits, bitorder="little").view(np.int32)
    packed.flags.writeable = False
    return packed


def is_allowed(mask: PackedMask, token_id: int) -> bool:
    """Whether the bit of a token is set."""
    return bool(mask.view(np.uint32)[token_id // _WORD_BITS] >> np.uint32(token_id % _WORD_BITS) & np.uint32(1))


def allow(mask: PackedMask, token_id: int) -> None:
    """Set one bit."""
    mask.view(np.uint32)[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)


def forbid(mask: PackedMask, token_ids: Iterable[int]) -> None:
    """Clear the bits of `token_ids`."""
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // _WORD_BITS] &= np.uint32(~(1 << token_id % _WORD_BITS) & 0xFFFFFFFF)
