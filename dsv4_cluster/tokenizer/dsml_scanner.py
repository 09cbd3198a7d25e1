"""Between the engine's tokens and deepseek-recipe's parser: no tool markup passes that is not a proper tool block.

| output                                       | becomes                                                          |
|----------------------------------------------|------------------------------------------------------------------|
| text without a tag                           | the same tokens                                                  |
| an invoke in a wrapper                       | a call, whatever its name; `ToolBlock` says what is repaired     |
| an invoke without a wrapper                  | a call when it names a tool of the request                       |
| the same inside the thoughts                 | a call; the thoughts end where the block begins                  |
| what follows a block                         | nothing: the answer is over                                      |
| any other tag, a second `</think>`           | nothing; the text around it stays                                |
| a block when the request has no tools        | nothing; the text around it stays, from `</think>` on at least   |

Text is held back while it could still become a tag, be it with what follows a tag that is removed. Everything is
decided on text, so the result does not depend on how it is cut into tokens, nor tokens into chunks. Tokens of ordinary
text pass through as they are, with their logprobs; markup goes on as text that carries the count of its tokens. A token
that is half text, half markup counts and has no logprobs, and so does a special token of the answer that may
hold a part of a stop string. Every token in front of what ends the thoughts is a reasoning token, removed markup too.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import deepseek_recipe as recipe

from dsv4_cluster.tokenizer.detokenizer import IncrementalDetokenizer
from dsv4_cluster.tokenizer.dsml_block import Properties, ToolBlock
from dsv4_cluster.tokenizer.dsml_tags import (
    MAX_MARK_CHARS,
    TRIGGERS,
    Tag,
    TagKind,
    Unfinished,
    first_trigger,
    is_cut_mark,
    may_become_mark,
    parse_tag,
    parse_thoughts_end,
)
from dsv4_cluster.tokenizer.text import THINK_END, TextTokenizer

_MAX_JOINT_CHARS = 32  # a run of half tags is looked back into so far; a run of "<" would be held for ever
_REPLACEMENT = "\ufffd"  # at the end of an answer the parser takes its token for half a character and drops it
Logprobs = tuple[float, list[tuple[int, float]]]  # the token's own value, alternatives with theirs


@dataclass(slots=True)
class _Piece:
    """Text that is held, and the tokens it came in; the last token completes its last character."""

    text: str
    tokens: list[tuple[int, Logprobs | None]]  # empty for the rest of a piece whose beginning is gone: it is counted


@dataclass(slots=True)
class _Output:
    """Chunks for the parser, in order."""

    chunks: list[recipe.InferenceChunk] = field(default_factory=list)

    def add_piece(self, piece: _Piece) -> None:
        if not piece.tokens or piece.text.endswith(_REPLACEMENT):
            self.add_text(piece.text, len(piece.tokens))
            return
        for token_id, logprobs in piece.tokens:
            self.chunks.append(recipe.InferenceChunk.tokens([token_id], None if logprobs is None else [logprobs]))

    def add_text(self, text: str, num_tokens: int) -> None:
        if text or num_tokens:
            self.chunks.append(recipe.InferenceChunk.text(text, num_tokens))


class MarkupScanner:
    """One answer. Push its tokens, then finish; stop early when `is_closed`."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        tools: Mapping[str, Properties],
        *,
        is_thinking: bool = False,
        starts_in_block: bool = False,
        max_calls: int | None = None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        """tools: parameters of each tool, by name. is_thinking: the output starts inside the thoughts.

        starts_in_block: the prompt ends with the wrapper's tag. max_calls: the answer ends behind that many.
        stop_strings: what the parser looks for in the answer.
        """
        self._is_thinking = is_thinking
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._tools = tools
        self._max_calls = max_calls
        self._block = self._new_block(is_open=True) if starts_in_block else None
        self._pieces: deque[_Piece] = deque()
        self._text = ""  # of all pieces
        self._before_block = ""  # held in front of a block that is removed
        self._parts: list[tuple[int, Logprobs | None]] = []  # tokens of an unfinished character
        self.num_thought_tokens = 0  # that began in the thoughts, removed markup included, `</think>` not
        self.is_closed = False  # the block is complete, nothing that follows counts

    def push(self, token_id: int, logprobs: Logprobs | None) -> list[recipe.InferenceChunk]:
        """Take one token, return what is certain."""
        self._parts.append((token_id, logprobs))
        text = self._detokenizer.push(token_id)
        if not text:
            return []
        piece, self._parts = _Piece(text, self._parts), []
        out = _Output()
        if self._block is None and not self._pieces and not any(trigger in text for trigger in TRIGGERS):
            self._pass_on(out, piece)
            return out.chunks
        self._pieces.append(piece)
        self._text += text
        self._advance(out, is_last=False)
        return out.chunks

    def skip_token(self) -> None:
        """A token was generated that stands for no text."""
        self.num_thought_tokens += self._is_thinking

    def finish(self, *, is_complete: bool) -> list[recipe.InferenceChunk]:
        """The rest. is_complete: the model ended its answer; else the length limit cut it, and a call stays open."""
        out = _Output()
        self._advance(out, is_last=True)
        if self._block is not None and not self._tools:
            self._block = None
            self._put_back(self._before_block)
            self._advance(out, is_last=True)
        if self._block is None:
            self._pass_on(out, _Piece("", self._parts))
            return out.chunks
        out.add_text(self._block.finish() if is_complete else "", len(self._parts))
        return out.chunks

    def _advance(self, out: _Output, *, is_last: bool) -> None:
        while self._text and not self.is_closed:
            is_stuck = (self._read_block if self._block is not None else self._read_text)(out, is_last=is_last)
            if is_stuck:
                break

    def _read_block(self, out: _Output, *, is_last: bool) -> bool:
        """Hand the text to the block. Returns whether more text is needed."""
        block = self._block
        assert block is not None
        text = self._within_thoughts(is_last=is_last)
        ends_here = self._text.startswith(THINK_END, len(text))
        written, end = block.read(text, 0, is_last=is_last or ends_here)
        num_tokens = self._drop(end)
        out.add_text(written if self._tools else "", num_tokens)
        if not block.is_done and not ends_here:
            return True
        self.is_closed = bool(self._tools)
        self._block = None
        self._put_back(self._before_block)
        return False

    def _within_thoughts(self, *, is_last: bool) -> str:
        """What a block may read. One that is removed from the thoughts ends with them; the answer behind them stays."""
        if self._tools or not self._is_thinking:
            return self._text
        before, end, _ = self._text.partition(THINK_END)
        if end or is_last:
            return before
        sizes = range(len(THINK_END) - 1, 0, -1)
        num_held = next((size for size in sizes if before.endswith(THINK_END[:size])), 0)
        return before[: len(before) - num_held]

    def _read_text(self, out: _Output, *, is_last: bool) -> bool:
        """Text outside of a block, up to and with the first tag. Returns whether more text is needed."""
        start, tag = self._first_tag(is_last=is_last)
        if tag is None:
            self._release(out, len(self._text))
            return True
        is_call = self._starts_call(tag, is_last=is_last)
        if isinstance(tag, Unfinished) or isinstance(is_call, Unfinished):
            self._release(out, self._joint(start), splits=False)
            return True
        if tag.kind is TagKind.THOUGHTS and self._is_thinking:
            self._end_text(out, start)
            self._is_thinking = False
            out.add_text(THINK_END, self._drop(tag.end - start))
        else:
            self._take(out, start, tag, is_call=is_call)
        return False

    def _take(self, out: _Output, start: int, tag: Tag, *, is_call: bool) -> None:
        """Begin a block at a tag, or remove the tag."""
        end = start if is_call and tag.kind is TagKind.INVOKE else tag.end  # the block reads its invokes itself
        if is_call and self._tools:
            self._end_text(out, start)
            self._is_thinking = False
            out.add_text("", self._drop(end - start))
            self._block = self._new_block()
            return
        keep = self._joint(start)
        self._release(out, keep)
        kept = self._text[: start - keep]
        out.add_text("", self._drop(end - keep))
        if is_call:
            self._block, self._before_block = self._new_block(), kept
        else:
            self._put_back(kept)

    def _end_text(self, out: _Output, end: int) -> None:
        """Pass on the last text of the thoughts or of the answer, without half a mark at its end."""
        starts = range(max(0, end - MAX_MARK_CHARS), end)
        cut = next((start for start in starts if is_cut_mark(self._text[start:end])), end)
        self._release(out, cut)
        out.add_text("", self._drop(end - cut))

    def _first_tag(self, *, is_last: bool) -> tuple[int, Tag | Unfinished | None]:
        """(where, what)."""
        start = first_trigger(self._text)
        while start >= 0:
            tag = parse_thoughts_end(self._text, start, is_last=is_last)
            tag = tag or parse_tag(self._text, start, is_last=is_last, takes_unmarked=False)
            if tag is not None:
                return start, tag
            start = first_trigger(self._text, start + 1)
        return len(self._text), None

    def _joint(self, end: int) -> int:
        """Where the text in front of `end` starts that could become a tag with what follows a tag removed there."""
        lowest = max(0, end - _MAX_JOINT_CHARS)
        while True:
            starts = range(max(lowest, end - MAX_MARK_CHARS), end)
            found = next((start for start in starts if may_become_mark(self._text[start:end])), end)
            if found == end:
                return end
            end = found

    def _put_back(self, text: str) -> None:
        """Text whose tokens are counted, in front of the rest."""
        if text:
            self._pieces.appendleft(_Piece(text, []))
            self._text = text + self._text

    def _starts_call(self, tag: Tag | Unfinished, *, is_last: bool) -> bool | Unfinished:
        if isinstance(tag, Unfinished):
            return tag
        if tag.kind is TagKind.WRAPPER and not tag.is_closing:
            return self._call_behind(tag.end, is_last=is_last)
        return _is_call(tag) and (tag.name in self._tools or not self._tools)

    def _call_behind(self, start: int, *, is_last: bool) -> bool | Unfinished:
        """Whether an invoke follows at once."""
        start += len(self._text[start:]) - len(self._text[start:].lstrip())
        if start == len(self._text):
            return False if is_last else Unfinished.TAG
        tag = parse_tag(self._text, start, is_last=is_last, takes_unmarked=True)
        return tag if isinstance(tag, Unfinished) else tag is not None and _is_call(tag)

    def _release(self, out: _Output, num_chars: int, *, splits: bool = True) -> None:
        """Pass text on as what it came in. splits: also the beginning of a piece; else that piece stays whole."""
        while num_chars:
            piece = self._pieces[0]
            size = min(len(piece.text), num_chars)
            if size == len(piece.text):
                self._pass_on(out, self._pieces.popleft())
            elif splits:
                out.add_text(piece.text[:size], self._counted(piece))
                piece.text, piece.tokens = piece.text[size:], []
            else:
                break
            self._text = self._text[size:]
            num_chars -= size

    def _pass_on(self, out: _Output, piece: _Piece) -> None:
        num_tokens = self._counted(piece)
        if self._stop_strings and not self._is_thinking and self._may_hold_stop(piece):
            out.add_text(piece.text, num_tokens)
        else:
            out.add_piece(piece)

    def _may_hold_stop(self, piece: _Piece) -> bool:
        """Whether a special token may hold a part of a stop string: the parser looks for those in text only."""
        spelled = [(token_id, self._tokenizer.decode([token_id])) for token_id, _ in piece.tokens]
        added = [text for token_id, text in spelled if self._tokenizer.added_token_ids.get(text) == token_id]
        return any(_overlap(text, stop) for text in added for stop in self._stop_strings)

    def _counted(self, piece: _Piece) -> int:
        """The number of tokens that begin in the piece, which are thoughts while the model thinks."""
        if self._is_thinking:
            self.num_thought_tokens += len(piece.tokens)
        return len(piece.tokens)

    def _drop(self, num_chars: int) -> int:
        """Take text away. Returns: the number of tokens that began in it."""
        self._text = self._text[num_chars:]
        num_tokens = 0
        while num_chars:
            piece = self._pieces[0]
            num_tokens += self._counted(piece)
            if len(piece.text) <= num_chars:
                self._pieces.popleft()
                num_chars -= len(piece.text)
            else:
                piece.text, piece.tokens = piece.text[num_chars:], []
                num_chars = 0
        return num_tokens

    def _new_block(self, *, is_open: bool = False) -> ToolBlock:
        return ToolBlock(self._tools, is_open=is_open, max_calls=self._max_calls)


def _overlap(text: str, other: str) -> bool:
    """Whether the two can share characters when they stand in one longer text."""
    if text in other or other in text:
        return True
    sizes = range(1, min(len(text), len(other)))
    return any(text.endswith(other[:size]) or other.endswith(text[:size]) for size in sizes)


def _is_call(tag: Tag) -> bool:
    return tag.kind is TagKind.INVOKE and not tag.is_closing and bool(tag.name)
