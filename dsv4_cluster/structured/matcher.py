"""Matcher: which tokens may come next in one answer. It walks forward with `accept` and back with `rollback`.

| phase    | allowed                                            | ends with                             |
|----------|----------------------------------------------------|---------------------------------------|
| THINKING | everything                                         | </think>, or a tool block that opens  |
| TEXT     | text and EOS; the DSML mark after "<"              | the mark, EOS                         |
| GRAMMAR  | what the parser allows; EOS exactly when it accepts | EOS                                   |
| DONE     | EOS                                                |                                       |

In thoughts the sampler takes </think> where the model draws EOS, so EOS does not end a constrained answer there.
Only "auto" tool calls have a TEXT phase; it needs no parser and costs nothing. Ordinary tokens may not spell the mark:
the output parser would read it as the token.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

import llguidance
import numpy as np

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.structured.bitmask import PackedMask, allow, forbid
from dsv4_cluster.structured.dsml import BlockStart
from dsv4_cluster.structured.grammar import CompiledGrammar
from dsv4_cluster.structured.source import short_reason
from dsv4_cluster.structured.vocabulary import DSML_MARK, GrammarVocabulary

MAX_ROLLBACK_TOKENS = 64
_OPENING_TAG = f"<{DSML_MARK}tool_calls>".encode()
_OPENING_LINE = _OPENING_TAG + b"\n"
_OPENING_TOKENS = 16  # more than any spelling of the opening line has
_TAIL_BYTES = 2 * len(_OPENING_TAG)


class Phase(Enum):
    """Where in the answer the matcher stands."""

    THINKING = "thinking"
    TEXT = "text"
    GRAMMAR = "grammar"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class _State:
    """What `rollback` restores."""

    phase: Phase
    parser: llguidance.LLMatcher | None
    num_parsed: int  # tokens the parser has consumed
    tail: bytes  # last bytes of the text since the last special token other than the mark


class Matcher:
    """The constraint on one answer. Not thread-safe, but it may move between threads."""

    def __init__(self, grammar: CompiledGrammar, phase: Phase, parser: llguidance.LLMatcher | None) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._state = _State(phase, parser, 0, b"")
        self._history: deque[_State] = deque(maxlen=MAX_ROLLBACK_TOKENS)

    @classmethod
    def of_answer(cls, grammar: CompiledGrammar, *, thinking: bool, prompt_token_ids: Sequence[int]) -> Self:
        """The matcher of a new answer. It stands in front of the first generated token.

        thinking: the answer starts inside the thoughts and the constraint after them. prompt_token_ids: a prompt may
        end with the opening line of a tool block. Raises: InvalidRequestError when the grammar cannot be compiled.
        """
        if thinking:
            return cls(grammar, Phase.THINKING, None)
        if grammar.is_tool_call and _ends_in_opening_line(prompt_token_ids, grammar.vocabulary):
            return cls(grammar, Phase.GRAMMAR, grammar.parser(BlockStart.LINE))
        if grammar.spec.kind == "tool_call":
            return cls(grammar, Phase.TEXT, None)
        return cls(grammar, Phase.GRAMMAR, grammar.parser())

    @property
    def phase(self) -> Phase:
        """Where the matcher stands."""
        return self._state.phase

    @property
    def is_free(self) -> bool:
        """True when any token may come next, so that no mask is needed."""
        return self._state.phase is Phase.THINKING

    @property
    def is_finished(self) -> bool:
        """True when nothing but EOS may follow."""
        state = self._state
        if state.phase is not Phase.GRAMMAR or state.parser is None:
            return state.phase is Phase.DONE
        return state.parser.is_stopped()

    def mask(self, out: PackedMask) -> None:
        """Write the tokens that may come next into `out` ([num_words] int32, contiguous). At least one bit is set.

        Raises: InvalidRequestError when the parser ran into its limits; the matcher is then of no more use.
        """
        state, vocabulary = self._state, self._vocabulary
        if state.phase is Phase.THINKING:
            out[:] = vocabulary.full_mask
        elif state.phase is Phase.TEXT:
            out[:] = vocabulary.text_mask
            allow(out, vocabulary.eos_token_id)
            if state.tail.endswith(b"<"):
                allow(out, vocabulary.dsml_token_id)
            forbid(out, vocabulary.mark_completions(state.tail))
        elif state.phase is Phase.DONE:
            out[:] = 0
            allow(out, vocabulary.eos_token_id)
        else:
            self._parser_mask(out)

    def accepts(self, token_id: int) -> bool:
        """Whether `accept` would take the token. The mark guard is not asked: it is in the masks only."""
        state, vocabulary = self._state, self._vocabulary
        is_eos = token_id == vocabulary.eos_token_id
        if state.phase is Phase.THINKING:
            return True
        if state.phase is Phase.DONE:
            return is_eos
        if state.phase is Phase.TEXT:
            is_mark = token_id == vocabulary.dsml_token_id and state.tail.endswith(b"<")
            return is_eos or is_mark or token_id not in vocabulary.special_token_ids
        assert state.parser is not None
        return state.parser.is_accepting() if is_eos else state.parser.validate_tokens([token_id]) == 1

    def accept(self, token_id: int) -> None:
        """Advance by one token. Raises: InvalidRequestError when it is not allowed or the parser runs into its limits;
        the matcher stays where it was.
        """
        if not self.accepts(token_id):
            parser = self._state.parser
            if parser is not None and parser.is_error():
                raise _lost(parser)
            raise InvalidRequestError(f"token {token_id} breaks the constraint of the answer ({self.phase.value})")
        before = self._state
        self._state = self._after(token_id)
        self._history.append(before)

    def rollback(self, num_tokens: int) -> None:
        """Take the last `num_tokens` accepted tokens back; at most MAX_ROLLBACK_TOKENS.

        Raises: InvalidRequestError when the parser had run into its limits; the matcher is then of no more use.
        """
        if num_tokens == 0:
            return
        assert num_tokens <= len(self._history), (num_tokens, len(self._history))
        current = self._state
        for _ in range(num_tokens):
            self._state = self._history.pop()
        parser = self._state.parser
        if parser is not None:
            assert parser is current.parser, "a parser is made once per answer"
            num_parsed = current.num_parsed - self._state.num_parsed
            if num_parsed and not parser.rollback(num_parsed):
                raise _lost(parser)

    def copy(self) -> "Matcher":
        """An independent matcher in the same place; it cannot be rolled back beyond it."""
        state = self._state
        twin = Matcher(self._grammar, state.phase, None if state.parser is None else state.parser.deep_copy())
        twin._state = _State(state.phase, twin._state.parser, state.num_parsed, state.tail)
        return twin

    def _parser_mask(self, out: PackedMask) -> None:
        state, vocabulary = self._state, self._vocabulary
        parser = state.parser
        assert parser is not None and out.flags.c_contiguous and len(out) == vocabulary.num_words
        parser.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        if parser.is_error():
            raise _lost(parser)
        if parser.is_stopped() and not parser.is_accepting():
            raise InvalidRequestError(
                f"the constraint of the answer leads into a dead end ({parser.stop_reason()}): no text completes it"
            )
        completions = vocabulary.mark_completions(state.tail)
        if completions:
            before = out.copy()
            forbid(out, completions)
            if not np.any(out):  # the grammar itself demands the spelling
                out[:] = before

    def _after(self, token_id: int) -> _State:
        state, vocabulary = self._state, self._vocabulary
        if token_id == vocabulary.eos_token_id:
            return _State(Phase.DONE, state.parser, state.num_parsed, b"")
        tail = self._tail_after(token_id)
        if state.phase is Phase.GRAMMAR:
            assert state.parser is not None
            if not state.parser.consume_token(token_id):
                raise _lost(state.parser)
            return _State(state.phase, state.parser, state.num_parsed + 1, tail)
        if state.phase is Phase.TEXT:
            if token_id == vocabulary.dsml_token_id:
                return _State(Phase.GRAMMAR, self._grammar.parser(BlockStart.MARK), 0, b"")
            return _State(state.phase, None, 0, tail)
        return self._after_thought(token_id, tail)

    def _after_thought(self, token_id: int, tail: bytes) -> _State:
        """The thoughts end with their closing token, or with a tool block, which the output parser takes as the end."""
        grammar = self._grammar
        if token_id == self._vocabulary.think_end_token_id:
            if grammar.spec.kind == "tool_call":
                return _State(Phase.TEXT, None, 0, b"")
            return _State(Phase.GRAMMAR, grammar.parser(), 0, b"")
        if grammar.is_tool_call and _OPENING_TAG in tail:
            rest = tail.rpartition(_OPENING_TAG)[2]
            if not rest.strip():
                start = BlockStart.LINE if rest else BlockStart.TAG
                return _State(Phase.GRAMMAR, grammar.parser(start), 0, b"")
        return _State(Phase.THINKING, None, 0, tail)

    def _tail_after(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        if token_id in vocabulary.special_token_ids and token_id != vocabulary.dsml_token_id:
            return b""
        return (self._state.tail + vocabulary.token_bytes(token_id))[-_TAIL_BYTES:]


def _ends_in_opening_line(prompt_token_ids: Sequence[int], vocabulary: GrammarVocabulary) -> bool:
    tail = b"".join(map(vocabulary.token_bytes, prompt_token_ids[-_OPENING_TOKENS:]))
    return tail.endswith(_OPENING_LINE)


def _lost(parser: llguidance.LLMatcher) -> InvalidRequestError:
    """The library reports errors as a state in which it answers on, with EOS as the only token allowed."""
    reason = short_reason(parser.get_error() or str(parser.stop_reason()))
    return InvalidRequestError(f"the constraint of the answer cannot be followed further: {reason}")
