"""Stop strings over a stream of tokens: text is held back while it could still become a stop string.

The match that ends first wins, and of those the longest, so the result does not depend on how the text is cut.
"""

from collections.abc import Sequence

from dsv4_cluster.tokenizer.detokenizer import IncrementalDetokenizer
from dsv4_cluster.tokenizer.text import TextTokenizer


class StopText:
    """Cuts a stream of text pieces before the first stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""
        self.is_stopped = False
        self.num_released = 0  # characters handed out so far

    def push(self, text: str) -> str:
        """Return the text that is certain to be in front of any stop string; "" once stopped."""
        if self.is_stopped:
            return ""
        text = self._held + text
        cut = self._first_match(text)
        if cut is not None:
            self.is_stopped, self._held = True, ""
            return self._release(text[:cut])
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return self._release(text[: len(text) - num_held])

    def finish(self) -> str:
        """Return what was held back; "" once stopped."""
        text, self._held = self._held, ""
        return self._release(text)

    def _release(self, text: str) -> str:
        self.num_released += len(text)
        return text

    def _first_match(self, text: str) -> int | None:
        """Start of the stop string that ends first; of two with the same end, the longer."""
        matches = [(start + len(s), start) for s in self._strings if (start := text.find(s)) >= 0]
        return min(matches)[1] if matches else None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(s.startswith(end) for s in self._strings):
                return length
        return 0


class StopTextStream:
    """Detokeniser and stop strings together: tokens in, text to show out."""

    def __init__(self, tokenizer: TextTokenizer, strings: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopText(strings)
        self.num_decoded = 0  # characters decoded so far, held and cut ones included

    @property
    def is_stopped(self) -> bool:
        """True once a stop string was found: the caller ends the request."""
        return self._stop.is_stopped

    @property
    def num_released(self) -> int:
        """Characters handed out so far."""
        return self._stop.num_released

    def push(self, token_id: int) -> str:
        """Return the text to show after this token; "" while text is held back, and once stopped."""
        return self._push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Return the rest at the end of the sequence; a stop string may still be found in it."""
        return self._push(self._detokenizer.finish()) + self._stop.finish()

    def _push(self, text: str) -> str:
        self.num_decoded += len(text)
        return self._stop.push(text)
