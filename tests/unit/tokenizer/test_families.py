"""Messages and Responses read an answer as chat does: every golden completion, however it is cut, streamed or whole."""

import json
import random
from typing import Any

import deepseek_recipe as recipe
import pytest

from dsv4_cluster.tokenizer.chat_output import ChatParser
from dsv4_cluster.tokenizer.family import ApiFamily
from dsv4_cluster.tokenizer.messages_family import MESSAGES
from dsv4_cluster.tokenizer.responses_family import RESPONSES
from tests.kit.codec import CONTEXT_LIMIT, NAMES, chunks_of, load_codec, tokens_of
from tests.kit.golden_completions import TOOLS, Golden, golden_completions

GOLDENS = [golden for golden in golden_completions() if not golden.fields]
NUM_PARTS = 8
FUNCTIONS = [tool["function"] for tool in TOOLS]
Message = dict[str, Any]  # content, reasoning, calls as [name, arguments as text], end


def messages_body(golden: Golden) -> dict[str, Any]:
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS] if golden.has_tools else None
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "enabled" if golden.thinks else "disabled"},
        "tools": tools,
    }


def responses_body(golden: Golden) -> dict[str, Any]:
    tools = [{"type": "function", **function} for function in FUNCTIONS] if golden.has_tools else None
    return {"input": "hi", "reasoning": {"effort": "high" if golden.thinks else "none"}, "tools": tools}


def events_of(family: ApiFamily, body: dict[str, Any], golden: Golden, cuts: list[int]) -> list[Any]:
    body = {"model": NAMES[0], **{name: value for name, value in body.items() if value is not None}}
    prompt = load_codec().chat.encode(body, family=family, context_limit=CONTEXT_LIMIT)
    parser = ChatParser(load_codec().chat, prompt, response_id="id", eos_token_id=load_codec().text.eos_token_id)
    chunks = chunks_of(tokens_of(golden.output), cuts, finish=golden.ends_by)
    return [event for chunk in chunks if not parser.is_finished for event in parser.push(chunk)]


def messages_seen(golden: Golden, cuts: list[int]) -> tuple[Message, Message]:
    """(put together from the events, the whole message)."""
    events = events_of(MESSAGES, messages_body(golden), golden, cuts)
    texts = [json.loads(event.to_json()) for event in events]
    whole = recipe.MessagesResponse("id", "m", 0, 1, 0)
    for event in events:
        whole.accumulate(event)
    body = json.loads(whole.to_json())
    seen: Message = {"content": "", "reasoning": "", "calls": [], "end": None}
    for event in texts:
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            seen["calls"].append([block["name"], ""])
        seen["content"] += delta.get("text", "")
        seen["reasoning"] += delta.get("thinking", "")
        if "partial_json" in delta:
            seen["calls"][-1][1] += delta["partial_json"]
        seen["end"] = delta.get("stop_reason") or seen["end"]
    kinds = {kind: [b for b in body["content"] if b["type"] == kind] for kind in ("text", "thinking", "tool_use")}
    return seen, {
        "content": "".join(block["text"] for block in kinds["text"]),
        "reasoning": "".join(block["thinking"] for block in kinds["thinking"]),
        "calls": [[block["name"], block["input"]] for block in kinds["tool_use"]],
        "end": body["stop_reason"],
    }


def responses_seen(golden: Golden, cuts: list[int]) -> tuple[Message, Message]:
    """(put together from the events, the response of the last event)."""
    texts = [json.loads(event.to_json()) for event in events_of(RESPONSES, responses_body(golden), golden, cuts)]
    assert [event["sequence_number"] for event in texts] == list(range(len(texts)))
    seen: Message = {"content": "", "reasoning": "", "calls": [], "end": texts[-1]["response"]["status"]}
    for event in texts:
        kind = event["type"]
        if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            seen["calls"].append([event["item"]["name"], ""])
        elif kind == "response.function_call_arguments.delta":
            seen["calls"][-1][1] += event["delta"]
        elif kind == "response.output_text.delta":
            seen["content"] += event["delta"]
        elif kind == "response.reasoning_text.delta":
            seen["reasoning"] += event["delta"]
    output = texts[-1]["response"]["output"]
    kinds = {kind: [i for i in output if i["type"] == kind] for kind in ("message", "reasoning", "function_call")}
    return seen, {
        "content": "".join(part["text"] for item in kinds["message"] for part in item["content"]),
        "reasoning": "".join(part["text"] for item in kinds["reasoning"] for part in item["content"]),
        "calls": [[item["name"], item["arguments"]] for item in kinds["function_call"]],
        "end": texts[-1]["response"]["status"],
    }


def check(golden: Golden, seen: Message, whole: Message, ends: dict[str, str]) -> None:
    assert (seen["content"], seen["reasoning"]) == (golden.content, golden.reasoning), golden.name
    assert {**seen, "calls": None} == {**whole, "calls": None}, golden.name
    assert seen["end"] == ends[golden.finish], golden.name
    if golden.open_call is None:
        as_values = [[name, json.loads(text)] for name, text in seen["calls"]]
        kept = [[name, json.loads(call) if isinstance(call, str) else call] for name, call in whole["calls"]]
        assert as_values == golden.calls == kept, golden.name
    else:
        assert seen["calls"] == [golden.open_call], golden.name


@pytest.mark.parametrize("index", range(NUM_PARTS))
def test_messages_and_responses_hold_the_goldens_for_random_chunks(index):
    for number, golden in enumerate(GOLDENS[index::NUM_PARTS]):
        rng = random.Random(1000 * index + number)
        ids = tokens_of(golden.output)
        cuts = sorted(rng.sample(range(len(ids)), rng.randrange(len(ids))))
        for many in ([], cuts):
            check(
                golden,
                *messages_seen(golden, many),
                {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"},
            )
            check(
                golden,
                *responses_seen(golden, many),
                {"stop": "completed", "tool_calls": "completed", "length": "incomplete"},
            )
