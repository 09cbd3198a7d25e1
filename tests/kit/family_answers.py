"""Goldens as requests of Messages and Responses, and what a client of either has in the end: from the whole body, or
put together from the events of a stream.
"""

import json
from collections.abc import Iterable
from typing import Any

from tests.kit.golden_completions import TOOLS, Golden

FUNCTIONS = [tool["function"] for tool in TOOLS]
MESSAGES_ENDS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
RESPONSES_ENDS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
Message = dict[str, Any]  # content, reasoning, calls as [name, arguments: as text, or a value], end


def messages_body(golden: Golden) -> dict[str, Any]:
    """Fields of `/v1/messages`."""
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "enabled" if golden.thinks else "disabled"},
        **({"tools": tools} if golden.has_tools else {}),
    }


def responses_body(golden: Golden) -> dict[str, Any]:
    """Fields of `/v1/responses`."""
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    return {
        "input": "hi",
        "reasoning": {"effort": "high" if golden.thinks else "none"},
        **({"tools": tools} if golden.has_tools else {}),
    }


def messages_of_events(events: Iterable[dict[str, Any]]) -> Message:
    """From a stream of Messages."""
    seen: Message = {"content": "", "reasoning": "", "calls": [], "end": None}
    for event in events:
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            seen["calls"].append([block["name"], ""])
        seen["content"] += delta.get("text", "")
        seen["reasoning"] += delta.get("thinking", "")
        if "partial_json" in delta:
            seen["calls"][-1][1] += delta["partial_json"]
        seen["end"] = delta.get("stop_reason") or seen["end"]
    return seen


def messages_of_body(body: dict[str, Any]) -> Message:
    """From a whole message."""
    kinds = {kind: [b for b in body["content"] if b["type"] == kind] for kind in ("text", "thinking", "tool_use")}
    return {
        "content": "".join(block["text"] for block in kinds["text"]),
        "reasoning": "".join(block["thinking"] for block in kinds["thinking"]),
        "calls": [[block["name"], block["input"]] for block in kinds["tool_use"]],
        "end": body["stop_reason"],
    }


def responses_of_events(events: list[dict[str, Any]]) -> Message:
    """From a stream of Responses."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    seen: Message = {"content": "", "reasoning": "", "calls": [], "end": events[-1]["response"]["status"]}
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            seen["calls"].append([event["item"]["name"], ""])
        elif kind == "response.function_call_arguments.delta":
            seen["calls"][-1][1] += event["delta"]
        elif kind == "response.output_text.delta":
            seen["content"] += event["delta"]
        elif kind == "response.reasoning_text.delta":
            seen["reasoning"] += event["delta"]
    return seen


def responses_of_body(body: dict[str, Any]) -> Message:
    """From a whole response."""
    output = body["output"]
    kinds = {kind: [i for i in output if i["type"] == kind] for kind in ("message", "reasoning", "function_call")}
    return {
        "content": "".join(part["text"] for item in kinds["message"] for part in item["content"]),
        "reasoning": "".join(part["text"] for item in kinds["reasoning"] for part in item["content"]),
        "calls": [[item["name"], item["arguments"]] for item in kinds["function_call"]],
        "end": body["status"],
    }


def check_family(golden: Golden, seen: Message, whole: Message, ends: dict[str, str]) -> None:
    """The streamed and the whole answer are the golden's. ends: how the family calls the golden's finish reasons."""
    assert (seen["content"], seen["reasoning"]) == (golden.content, golden.reasoning), golden.name
    assert {**seen, "calls": None} == {**whole, "calls": None}, golden.name
    assert seen["end"] == ends[golden.finish], golden.name
    if golden.open_call is None:
        as_values = [[name, json.loads(text)] for name, text in seen["calls"]]
        kept = [[name, json.loads(call) if isinstance(call, str) else call] for name, call in whole["calls"]]
        assert as_values == golden.calls == kept, golden.name
    else:
        assert seen["calls"] == [golden.open_call], golden.name
