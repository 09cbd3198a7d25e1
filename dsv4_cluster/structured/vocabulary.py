"""A checkpoint's vocabulary as the grammar engine needs it: token bytes, special ids, and the masks that never change.

All added tokens are special: no text of a grammar spells them, a grammar names them by id.
"""

import deepseek_recipe as recipe
import llguidance

from dsv4_cluster.structured.bitmask import num_words, pack
from dsv4_cluster.tokenizer.text import TextTokenizer

DSML_MARK = recipe.SpecialToken.Dsml.default_str()


class GrammarVocabulary:
    """Immutable once built; building takes about 0.4 s of CPU for the real vocabulary. Safe on several threads."""

    def __init__(self, tokenizer: TextTokenizer, *, vocab_size: int, eos_token_id: int) -> None:
        """vocab_size: number of logits; ids beyond the tokenizer's are never allowed.

        Raises: CheckpointError when the tokenizer lacks </think> or the DSML mark.
        """
        self.vocab_size = vocab_size
        self.num_words = num_words(vocab_size)
        self.eos_token_id = eos_token_id
        self.think_end_token_id = tokenizer.special_token_id(recipe.SpecialToken.ThinkingEnd)
        self.dsml_token_id = tokenizer.special_token_id(recipe.SpecialToken.Dsml)
        self._token_bytes = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        added = {token_id for token_id in tokenizer.added_token_ids.values() if token_id < vocab_size}
        absent = {token_id for token_id, spelling in enumerate(self._token_bytes) if not spelling}
        self.special_token_ids = frozenset(added | absent | {eos_token_id})
        self.text_mask = pack(set(range(vocab_size)) - self.special_token_ids, vocab_size)
        self.full_mask = pack(range(vocab_size), vocab_size)
        source = _TokenizerSource(tokenizer, self._token_bytes, sorted(self.special_token_ids), eos_token_id)
        self.lltokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(source),
            n_vocab=vocab_size,
            eos_token=eos_token_id,
        )
        self._mark_completions = self._find_mark_completions()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special tokens spelled out."""
        return self._token_bytes[token_id]

    def mark_completions(self, tail: bytes) -> tuple[int, ...]:
        """Ordinary tokens that would spell the DSML mark after a text that ends in `tail`; seldom any."""
        mark = DSML_MARK.encode()
        found: tuple[int, ...] = ()
        for length in range(1, len(mark)):
            if tail.endswith(mark[:length]):
                found += self._mark_completions[length]
        return found

    def _find_mark_completions(self) -> tuple[tuple[int, ...], ...]:
        """Index = number of mark bytes already there. No token of the vocabulary spells the whole mark."""
        mark = DSML_MARK.encode()
        last = mark[-1:]
        candidates = [
            (token_id, spelling)
            for token_id, spelling in enumerate(self._token_bytes)
            if last in spelling and token_id not in self.special_token_ids
        ]
        return tuple(
            tuple(token_id for token_id, spelling in candidates if spelling.startswith(mark[length:]))
            for length in range(len(mark))
        )


class _TokenizerSource:
    """The attributes and the call from which llguidance's wrapper reads a vocabulary."""

    def __init__(
        self, tokenizer: TextTokenizer, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int
    ) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # the wrapper tries bytes first and goes by the refusal
            raise TypeError("text expected")
        return self._tokenizer.encode(text)
