"""A chat answer as a client has it in the end, from the whole response or put together from a stream's chunks."""

import json
from collections.abc import Iterable
from typing import Any

from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.tokenizer.chat_output import ChatMessage, ChatParser, ChatStream, response_json
from dsv4_cluster.tokenizer.encoding import ChatPrompt
from tests.kit.codec import CONTEXT_LIMIT, NAMES, load_codec

Answer = dict[str, Any]  # content, reasoning_content, tool_calls as [name, arguments], finish_reason, usage, logprobs


def prompt_of(fields: dict[str, Any], *, is_single_call: bool = False) -> ChatPrompt:
    """The prompt of a short request with these body fields."""
    body = {"model": NAMES[0], "messages": [{"role": "user", "content": "hi"}]}
    return load_codec().chat.encode(body | fields, context_limit=CONTEXT_LIMIT, is_single_call=is_single_call)


def parser_of(prompt: ChatPrompt) -> ChatParser:
    """A parser for one answer to it."""
    return ChatParser(load_codec().chat, prompt, response_id="id", eos_token_id=load_codec().text.eos_token_id)


def whole_answer(prompt: ChatPrompt, chunks: Iterable[TokenChunk]) -> Answer:
    """What a request that is not streamed gets."""
    message = ChatMessage(parser_of(prompt), prompt, response_id="id")
    for chunk in chunks:
        message.push(chunk)
    return answer_in(json.loads(response_json([message])))


def answer_in(body: dict[str, Any]) -> Answer:
    """The answer in a response body."""
    choice = body["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    assert all(call["id"].startswith("call_") for call in calls)
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        "finish_reason": choice["finish_reason"],
        "usage": body["usage"],
        "logprobs": {name: entries for name, entries in (choice["logprobs"] or {}).items() if entries},
    }


def streamed_answer(prompt: ChatPrompt, chunks: Iterable[TokenChunk]) -> Answer:
    """What a client puts together from a stream."""
    stream = ChatStream([parser_of(prompt)], include_usage=True)
    return answer_of_events(json.loads(text) for chunk in chunks for text in stream.push(chunk))


def answer_of_events(events: Iterable[dict[str, Any]]) -> Answer:
    """What a client puts together from the JSON of a stream."""
    answer: Answer = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None, "logprobs": {}}
    for event in events:
        answer["usage"] = event.get("usage")
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                answer[name] += delta.get(name) or ""
            for name, entries in (choice["logprobs"] or {}).items():
                if entries:
                    answer["logprobs"].setdefault(name, []).extend(entries)
            for part in delta.get("tool_calls") or []:
                if part["index"] == len(answer["tool_calls"]):
                    answer["tool_calls"].append([part["function"]["name"], ""])
                answer["tool_calls"][part["index"]][1] += part["function"].get("arguments", "")
            answer["finish_reason"] = choice["finish_reason"]
    return answer
