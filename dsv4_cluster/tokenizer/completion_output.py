"""Engine output to the text of a completion: stop strings, logprobs in step with the text, token count.

A token's logprobs are shown when the text it starts at is shown, and dropped when a stop string cuts that text, so the
pieces of a stream add up to the answer that is not streamed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_cluster.protocol.output import FinishReason, PromptLogprobs, TokenChunk, TokenLogprobs
from dsv4_cluster.tokenizer.chat_output import LOWEST_LOGPROB
from dsv4_cluster.tokenizer.detokenizer import IncrementalDetokenizer
from dsv4_cluster.tokenizer.stop_text import StopTextStream
from dsv4_cluster.tokenizer.text import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEntry:
    """One shown token. `text_offset` counts characters of the answer in front of it."""

    token: str
    logprob: float | None  # None: of a prompt's first token, and then `top` too
    top: dict[str, float] | None
    text_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPiece:
    """What one chunk adds to the answer."""

    text: str
    logprobs: tuple[LogprobEntry, ...]
    finish_reason: FinishReason | None


class CompletionOutput:
    """The text of one growing answer."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop_strings: Sequence[str],
        *,
        num_logprobs: int | None,
        echo: Sequence[int] = (),
        is_echo_only: bool = False,
    ) -> None:
        """num_logprobs: alternatives per token to show; None = no logprobs. echo: the prompt's ids, to be shown first.

        is_echo_only: what is generated is not shown. A BOS at the start of the echo is not shown either.
        """
        self._echo = echo
        self._is_echo_only = is_echo_only
        self._num_echoed = 0  # characters
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._text = StopTextStream(tokenizer, stop_strings)
        self._waiting: deque[LogprobEntry] = deque()
        self.num_tokens = 0  # completion tokens; the EOS or stop id that ends the answer is not counted
        self.num_cached_tokens = 0  # as the first chunk says; a decode engine has the whole prompt from the handoff
        self._is_started = False
        self.is_finished = False

    def push(self, chunk: TokenChunk) -> CompletionPiece:
        """Take one chunk. The caller stops the engine once `is_finished`."""
        if not self._is_started:
            self._is_started, self.num_cached_tokens = True, chunk.num_cached_tokens
            if self._echo:
                return self._with_echo(chunk)
        return self._answer(chunk)

    def _with_echo(self, chunk: TokenChunk) -> CompletionPiece:
        """The prompt in front of the first piece."""
        text, entries = self._prompt_text(chunk.prompt_logprobs)
        self._num_echoed = len(text)
        if self._is_echo_only:
            self.is_finished = True
            return CompletionPiece(text=text, logprobs=entries, finish_reason=FinishReason.LENGTH)
        piece = self._answer(chunk)
        return CompletionPiece(
            text=text + piece.text, logprobs=entries + piece.logprobs, finish_reason=piece.finish_reason
        )

    def _prompt_text(self, prompt_logprobs: PromptLogprobs | None) -> tuple[str, tuple[LogprobEntry, ...]]:
        """(the prompt, an entry per token of it)."""
        start = 1 if self._echo[0] == self._tokenizer.bos_token_id else 0
        detokenizer = IncrementalDetokenizer(self._tokenizer)
        text, entries = "", []
        for position in range(start, len(self._echo)):
            if self._num_logprobs is not None and prompt_logprobs is not None:
                entries.append(self._entry(self._echo[position], prompt_logprobs[position], len(text)))
            text += detokenizer.push(self._echo[position])
        return text + detokenizer.finish(), tuple(entries)

    def _answer(self, chunk: TokenChunk) -> CompletionPiece:
        text = ""
        for index, token_id in enumerate(chunk.token_ids):
            if self._text.is_stopped:
                break
            if token_id == chunk.stop_token_id:
                continue
            if token_id == self._tokenizer.eos_token_id:  # ignore_eos: generated and counted, but nothing to read
                self.num_tokens += 1
                continue
            if self._num_logprobs is not None and chunk.logprobs is not None:
                offset = self._num_echoed + self._text.num_decoded
                self._waiting.append(self._entry(token_id, chunk.logprobs[index], offset))
            self.num_tokens += 1
            text += self._text.push(token_id)
        finish_reason = chunk.finish_reason
        if finish_reason is not None:
            text += self._text.finish()
        if self._text.is_stopped:
            finish_reason = FinishReason.STOP
        self.is_finished = finish_reason is not None
        return CompletionPiece(text=text, logprobs=self._shown(), finish_reason=finish_reason)

    def _shown(self) -> tuple[LogprobEntry, ...]:
        """Take the entries whose text has been shown; at an end without a stop string, all of them."""
        shown = []
        takes_all = self.is_finished and not self._text.is_stopped
        num_shown = self._num_echoed + self._text.num_released
        while self._waiting and (takes_all or self._waiting[0].text_offset < num_shown):
            shown.append(self._waiting.popleft())
        return tuple(shown)

    def _entry(self, token_id: int, logprobs: TokenLogprobs | None, text_offset: int) -> LogprobEntry:
        if logprobs is None:
            return LogprobEntry(token=self._spell(token_id), logprob=None, top=None, text_offset=text_offset)
        ranked = sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[: self._num_logprobs]
        return LogprobEntry(
            token=self._spell(token_id),
            logprob=max(logprobs[token_id], LOWEST_LOGPROB),
            top={self._spell(alternative): max(value, LOWEST_LOGPROB) for alternative, value in ranked},
            text_offset=text_offset,
        )

    def _spell(self, token_id: int) -> str:
        """The token's text, or OpenAI's `bytes:\\xf0\\x9f` form for a part of a character."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
