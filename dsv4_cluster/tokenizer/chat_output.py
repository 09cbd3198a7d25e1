"""Engine output to chat-completions JSON through deepseek-recipe's parser: streamed chunks, or one whole message.

Token ids are pushed one by one, so the result does not depend on how the engine groups them (speculation sends
several per chunk), and a stop string ends the count at the token that completes it. EOS is never pushed.
"""

import json
import time
from typing import Any, cast

import deepseek_recipe as recipe

from dsv4_cluster.protocol.output import FinishReason, TokenChunk, TokenLogprobs
from dsv4_cluster.tokenizer.encoding import ChatCodec, ChatPrompt

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; the value OpenAI's API uses for "practically never"
_FINISH = {
    FinishReason.STOP: recipe.InferenceFinishReason.Stop,
    FinishReason.LENGTH: recipe.InferenceFinishReason.Length,
}


class ChatParser:
    """Turns the token chunks of one request into deepseek-recipe events."""

    def __init__(self, codec: ChatCodec, prompt: ChatPrompt, *, response_id: str, eos_token_id: int) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.conversion, response_id, prompt.model)
        self._processor = recipe.StreamProcessor(generator, prompt.conversion.parsing_options, codec.tokenizer)
        self._prompt = prompt
        self._eos_token_id = eos_token_id
        self._is_started = False
        self.num_tokens = 0  # completion tokens; EOS and stop ids are not counted

    @property
    def is_finished(self) -> bool:
        """True after the last event: a finish reason, or a stop string before it."""
        return self._processor.finished

    def push(self, chunk: TokenChunk) -> list[recipe.ChatCompletionChunk]:
        """Take one chunk, return its events. The caller stops the engine once `is_finished`."""
        events = [] if self._is_started else self._start(chunk.num_cached_tokens)
        for index, token_id in enumerate(chunk.token_ids):
            if self.is_finished:
                break
            if token_id in (self._eos_token_id, chunk.stop_token_id):
                continue
            logprobs = None
            if self._prompt.num_logprobs is not None and chunk.logprobs is not None:
                logprobs = [self._logprob_entry(token_id, chunk.logprobs[index])]
            self.num_tokens += 1
            events += self._push(recipe.InferenceChunk.tokens([token_id], logprobs))
        if chunk.finish_reason is not None and not self.is_finished:
            events += self._push(recipe.InferenceChunk.finish(_FINISH[chunk.finish_reason]))
        return events

    def close(self) -> None:
        """Drop the state of a request that will not finish."""
        self._processor.close()

    def _start(self, num_cached_tokens: int) -> list[recipe.ChatCompletionChunk]:
        self._is_started = True
        usage = recipe.PromptUsage(prompt_tokens=len(self._prompt.token_ids), prompt_cache_hit_tokens=num_cached_tokens)
        return self._push(recipe.InferenceChunk.ready(prompt_usage=usage))

    def _push(self, chunk: recipe.InferenceChunk) -> list[recipe.ChatCompletionChunk]:
        """The generator given to the processor makes every event a chat chunk."""
        return cast(list[recipe.ChatCompletionChunk], self._processor.push(chunk))

    def _logprob_entry(self, token_id: int, logprobs: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
        """(the token's own value, the most probable alternatives in order)."""
        ranked = sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[: self._prompt.num_logprobs]
        top = [(alternative, max(value, LOWEST_LOGPROB)) for alternative, value in ranked]
        return max(logprobs[token_id], LOWEST_LOGPROB), top


class ChatStream:
    """Chunks as JSON texts for a streamed answer; usage travels in one chunk of its own, and only when asked for."""

    def __init__(self, parser: ChatParser, *, include_usage: bool) -> None:
        self.parser = parser
        self._include_usage = include_usage

    def push(self, chunk: TokenChunk) -> list[str]:
        """Return the JSON of every event of this chunk."""
        texts: list[str] = []
        for event in self.parser.push(chunk):
            text = event.to_json()
            if _has_usage(text):
                texts += self._split_usage(json.loads(text))
            else:
                texts.append(text)
        return texts

    def _split_usage(self, event: dict[str, Any]) -> list[str]:
        usage = event.pop("usage")
        if not self._include_usage:
            return [_dumps(event)]
        counted = {**event, "choices": [], "usage": _counted(usage, self.parser.num_tokens)}
        return [_dumps({**event, "usage": None}), _dumps(counted)]


class ChatMessage:
    """The whole answer of a request that is not streamed."""

    def __init__(self, parser: ChatParser, prompt: ChatPrompt, *, response_id: str) -> None:
        self.parser = parser
        self._response_id = response_id
        self._prompt = prompt
        self._response: recipe.ChatCompletionResponse | None = None

    def push(self, chunk: TokenChunk) -> None:
        """Add one chunk."""
        if self._response is None:
            self._response = recipe.ChatCompletionResponse(
                self._response_id,
                self._prompt.model,
                int(time.time()),
                len(self._prompt.token_ids),
                chunk.num_cached_tokens,
            )
        for event in self.parser.push(chunk):
            self._response.accumulate(event)

    def to_json(self) -> str:
        """The response body; only after the parser has finished."""
        assert self._response is not None and self.parser.is_finished, "the answer is not complete"
        body = json.loads(self._response.to_json())
        body["usage"] = _counted(body["usage"], self.parser.num_tokens)
        return _dumps(body)


def _has_usage(text: str) -> bool:
    """True for the event that carries counts. A quote inside a JSON string is escaped, so the mark is structural."""
    return '"usage":{' in text


def _counted(usage: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The parser does not count the tokens of a character that the answer leaves unfinished; we did generate them."""
    return {**usage, "completion_tokens": num_tokens, "total_tokens": usage["prompt_tokens"] + num_tokens}


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
