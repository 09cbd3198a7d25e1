"""Engine output to chat-completions JSON through deepseek-recipe's parser: streamed chunks, or one whole message.

Token ids are pushed one by one, so the result does not depend on how the engine groups them (speculation sends
several per chunk), and a stop string ends the count at the token that completes it. EOS is never pushed.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, cast

import deepseek_recipe as recipe

from dsv4_cluster.protocol.output import FinishReason, TokenChunk, TokenLogprobs
from dsv4_cluster.tokenizer.dsml_block import parameters_by_tool
from dsv4_cluster.tokenizer.dsml_scanner import Logprobs, MarkupScanner
from dsv4_cluster.tokenizer.encoding import ChatCodec, ChatPrompt
from dsv4_cluster.tokenizer.family import Event

LOWEST_LOGPROB = -9999.0  # JSON has no -inf; the value OpenAI's API uses for "practically never"
_FINISH = {
    FinishReason.STOP: recipe.InferenceFinishReason.Stop,
    FinishReason.LENGTH: recipe.InferenceFinishReason.Length,
}


class ChatParser:
    """Turns the token chunks of one request into deepseek-recipe events."""

    def __init__(
        self,
        codec: ChatCodec,
        prompt: ChatPrompt,
        *,
        response_id: str,
        eos_token_id: int,
        system_fingerprint: str | None = None,
    ) -> None:
        """system_fingerprint: shown in chat completions."""
        parsing = prompt.parsing
        parsing.parse_json_output = False  # it blanks text around JSON, token by token; a grammar leaves none
        self._processor = recipe.StreamProcessor(prompt.generator(response_id), parsing, codec.tokenizer)
        self._scanner = MarkupScanner(
            codec.text,
            parameters_by_tool(prompt.conversion.conversation.tools),
            is_thinking=prompt.is_thinking,
            starts_in_block=prompt.parsing.starts_in_tool_calls,
            max_calls=1 if prompt.is_single_call else None,
            stop_strings=prompt.stop_strings,
        )
        self._prompt = prompt
        self._eos_token_id = eos_token_id
        self._system_fingerprint = system_fingerprint
        self._is_started = False
        self.num_tokens = 0  # completion tokens; the EOS or stop id that ends the answer is not counted

    @property
    def is_finished(self) -> bool:
        """True after the last event: a finish reason, or before it a stop string or the end of a tool block."""
        return self._processor.finished

    @property
    def num_thought_tokens(self) -> int:
        """Completion tokens in front of what ended the thoughts."""
        return self._scanner.num_thought_tokens

    def push(self, chunk: TokenChunk) -> list[Event]:
        """Take one chunk, return its events. The caller stops the engine once `is_finished`."""
        events = [] if self._is_started else self._start(chunk.num_cached_tokens)
        for index, token_id in enumerate(chunk.token_ids):
            if self.is_finished:
                break
            if token_id == chunk.stop_token_id:
                continue
            if token_id == self._eos_token_id:  # ignore_eos: generated and counted, but nothing to read
                self.num_tokens += 1
                self._scanner.skip_token()
                continue
            logprobs = None
            if self._prompt.num_logprobs is not None and chunk.logprobs is not None:
                logprobs = self._logprob_entry(token_id, chunk.logprobs[index])
            self.num_tokens += 1
            events += self._push_all(self._scanner.push(token_id, logprobs))
            if self._scanner.is_closed:
                events += self._push_all([recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)])
        if chunk.finish_reason is not None and not self.is_finished:
            events += self._push_all(self._scanner.finish(is_complete=chunk.finish_reason is FinishReason.STOP))
            events += self._push_all([recipe.InferenceChunk.finish(_FINISH[chunk.finish_reason])])
        return events

    def close(self) -> None:
        """Drop the state of a request that will not finish."""
        self._processor.close()

    def _start(self, num_cached_tokens: int) -> list[Event]:
        self._is_started = True
        usage = recipe.PromptUsage(prompt_tokens=len(self._prompt.token_ids), prompt_cache_hit_tokens=num_cached_tokens)
        return self._push(recipe.InferenceChunk.ready(prompt_usage=usage, system_fingerprint=self._system_fingerprint))

    def _push_all(self, chunks: Sequence[recipe.InferenceChunk]) -> list[Event]:
        """Up to the stop string, if there is one."""
        events: list[Event] = []
        for chunk in chunks:
            if not self.is_finished:
                events += self._push(chunk)
        return events

    def _push(self, chunk: recipe.InferenceChunk) -> list[Event]:
        return list(self._processor.push(chunk))

    def _logprob_entry(self, token_id: int, logprobs: TokenLogprobs) -> Logprobs:
        """(the token's own value, the most probable alternatives in order)."""
        ranked = sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[: self._prompt.num_logprobs]
        top = [(alternative, max(value, LOWEST_LOGPROB)) for alternative, value in ranked]
        return max(logprobs[token_id], LOWEST_LOGPROB), top


class ChatStream:
    """The n answers of one streamed request as JSON texts; usage travels in one last chunk, only when asked for."""

    def __init__(self, parsers: Sequence[ChatParser], *, include_usage: bool) -> None:
        """parsers: one per answer, in the order of the choices."""
        self.parsers = parsers
        self._include_usage = include_usage
        self._usages: dict[int, dict[str, Any]] = {}  # by choice

    def push(self, chunk: TokenChunk, index: int = 0) -> list[str]:
        """Return the JSON of every event of this chunk of choice `index`."""
        texts: list[str] = []
        for event in self.parsers[index].push(chunk):
            text = event.to_json()
            if index == 0 and not _has_usage(text):
                texts.append(text)
            else:
                texts += self._rewritten(json.loads(text), index)
        return texts

    def _rewritten(self, event: dict[str, Any], index: int) -> list[str]:
        """Number the choice and take the usage out; the last choice to end sends the sum."""
        for choice in event["choices"]:
            choice["index"] = index
        usage = event.get("usage")
        if usage is None:
            return [_dumps(event)]
        if not self._include_usage:
            return [_dumps({name: value for name, value in event.items() if name != "usage"})]
        self._usages[index] = _counted(usage, self.parsers[index])
        texts = [_dumps({**event, "usage": None})]
        if len(self._usages) == len(self.parsers):
            total = _summed([self._usages[i] for i in range(len(self.parsers))])
            texts.append(_dumps({**event, "choices": [], "usage": total}))
        return texts


class ChatMessage:
    """One whole answer of a request that is not streamed."""

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
            self._response.accumulate(cast(recipe.ChatCompletionChunk, event))

    def body(self) -> dict[str, Any]:
        """The response body with one choice; only after the parser has finished."""
        assert self._response is not None and self.parser.is_finished, "the answer is not complete"
        body: dict[str, Any] = json.loads(self._response.to_json())
        body["usage"] = _counted(body["usage"], self.parser)
        return body


def response_json(messages: Sequence[ChatMessage]) -> str:
    """The response body of n finished answers, one choice each."""
    bodies = [message.body() for message in messages]
    choices = [{**choice, "index": index} for index, body in enumerate(bodies) for choice in body["choices"]]
    return _dumps({**bodies[0], "choices": choices, "usage": _summed([body["usage"] for body in bodies])})


def _has_usage(text: str) -> bool:
    """True for the event that carries counts. A quote inside a JSON string is escaped, so the mark is structural."""
    return '"usage":{' in text


def _counted(usage: dict[str, Any], parser: ChatParser) -> dict[str, Any]:
    """The tokens that were generated: deepseek-recipe does not count those of a character that the answer leaves
    unfinished, and counts those that its tokenizer would have made of the thoughts, which may be more or fewer.
    """
    num_tokens = parser.num_tokens
    found = {**usage, "completion_tokens": num_tokens, "total_tokens": usage["prompt_tokens"] + num_tokens}
    found["completion_tokens_details"] = {"reasoning_tokens": parser.num_thought_tokens}
    return found


def _summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Usage of n answers: the prompt once, as the answer counts it that had the least of it in the cache."""
    if len(usages) == 1:
        return usages[0]
    total = dict(min(usages, key=lambda usage: usage["prompt_cache_hit_tokens"]))
    total["completion_tokens"] = sum(usage["completion_tokens"] for usage in usages)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    num_thoughts = sum(usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages)
    total["completion_tokens_details"] = {"reasoning_tokens": num_thoughts}
    return total


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
