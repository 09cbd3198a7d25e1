"""Tokens to text one at a time: no character is shown before its last byte, and the pieces add up to the whole text."""

import codecs

from dsv4_cluster.tokenizer.text import TextTokenizer


class IncrementalDetokenizer:
    """The text of one growing sequence. `"".join(pieces) == tokenizer.decode(token_ids)` for every sequence."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token, perhaps empty."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return the rest: U+FFFD when the sequence ends inside a character."""
        return self._decoder.decode(b"", final=True)
