"""Text that spells special tokens is plain text in every field of every chat API: nobody writes structure."""

from collections import Counter
from typing import Any

import pytest

from dsv4_cluster.tokenizer.family import CHAT, ApiFamily
from dsv4_cluster.tokenizer.messages_family import MESSAGES
from dsv4_cluster.tokenizer.responses_family import RESPONSES
from tests.kit.codec import NAMES, load_codec

P = "HERE"
USER = {"role": "user", "content": "json"}
SCHEMA = {"type": "object", "properties": {P: {"type": "string", "description": P, "enum": [P]}}}
CALL = {"id": P, "type": "function", "function": {"name": "f", "arguments": '{"a": "HERE"}'}}
THOUGHT = {"type": "thinking", "thinking": P, "signature": P}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {P: P}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": P}
# marks within what the model has said itself; the official encoding reads them in messages of the assistant
GROUNDING = {f"<｜{end}{name}｜>" for name in ("ref", "box", "point", "polygon") for end in ("", "/")}
BODIES: list[tuple[ApiFamily, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "system", "content": P}, {"role": "user", "content": P, "name": P}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": P}, {"type": "text", "text": P}]}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": P, "reasoning_content": P}, USER]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": P, "prefix": True}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": P, "prefix": True}]}),
    (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": P, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": P, "content": P},
            ]
        },
    ),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "description": P}}]}),
    (
        CHAT,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    (MESSAGES, {"messages": [USER], "system": P}),
    (
        MESSAGES,
        {"messages": [USER, {"role": "assistant", "content": [THOUGHT, USE]}, {"role": "user", "content": [RESULT]}]},
    ),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": P}]}),
    (MESSAGES, {"messages": [USER], "tools": [{"name": "f", "description": P, "input_schema": SCHEMA}]}),
    (MESSAGES, {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (RESPONSES, {"input": P, "instructions": P}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "developer", "content": P},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": P}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"HERE": 1}'},
                {"type": "function_call_output", "call_id": "1", "output": P},
            ]
        },
    ),
    (RESPONSES, {"input": "hi", "tools": [{"type": "function", "name": "f", "description": P, "parameters": SCHEMA}]}),
]


def with_text(value: Any, text: str) -> Any:
    """The same with the text in place of the mark, in keys as well."""
    if isinstance(value, str):
        return value.replace(P, text)
    if isinstance(value, list):
        return [with_text(inner, text) for inner in value]
    if isinstance(value, dict):
        return {key.replace(P, text): with_text(inner, text) for key, inner in value.items()}
    return value


@pytest.mark.parametrize("index", range(len(BODIES)))
def test_no_field_turns_a_spelling_into_a_special_token(index):
    family, body = BODIES[index]
    codec = load_codec()
    added = codec.text.added_token_ids
    spelled = "".join(sorted(set(added) - GROUNDING))
    special = set(added.values())
    fields = {"model": NAMES[0], **({"max_tokens": 9} if family is MESSAGES else {})}

    def special_ids(text: str) -> Counter[int]:
        ids = codec.chat.encode(fields | with_text(body, text), family=family, context_limit=10**6).token_ids
        return Counter(token_id for token_id in ids if token_id in special)

    assert len(added) > 800 and set(added) >= GROUNDING
    assert special_ids(spelled) == special_ids("x")
