"""Numbers, texts and nesting at and beyond the ends of what JSON can say, in every field: read, or a 400."""

import json
from collections.abc import Iterator

import httpx
import pytest

from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService, says

MODEL = "deepseek-v4-flash"
MARK = "｜DSML｜"
P = "HERE"  # where the value goes
USER = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
COUNT, INPUT_TOKENS, BATCHES = "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/batches"
GOOD = {
    CHAT: {"model": MODEL, "messages": [USER]},
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
    MESSAGES: {"model": MODEL, "messages": [USER], "max_tokens": 9},
    COUNT: {"model": MODEL, "messages": [USER]},
    RESPONSES: {"model": MODEL, "input": "hi"},
    INPUT_TOKENS: {"model": MODEL, "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    BATCHES: {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": P, "default": P, "enum": [P]}}}
FUNCTION = {"name": "f", "description": P, "parameters": SCHEMA}
STRICT = {**FUNCTION, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": P}}
THOUGHT = [
    {"type": "thinking", "thinking": P, "signature": P},
    {"type": "tool_use", "id": P, "name": "f", "input": {P: P}},
]
RESULT = [{"type": "tool_result", "tool_use_id": P, "content": P}]
CALLED = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": P}]},
    {"type": "function_call", "call_id": P, "name": "f", "arguments": P},
    {"type": "function_call_output", "call_id": P, "output": P},
]
SAMPLING = ("temperature", "top_p", "seed", "top_k", "min_p", "presence_penalty", "repetition_penalty", "min_tokens")
FIELDS = {
    CHAT: (
        *SAMPLING,
        "max_tokens",
        "max_completion_tokens",
        "n",
        "top_logprobs",
        "thinking_token_budget",
        "stop",
        "user",
    ),
    COMPLETIONS: (*SAMPLING, "max_tokens", "n", "logprobs", "prompt", "suffix", "stop", "user_id"),
    MESSAGES: (*SAMPLING, "max_tokens", "system", "stop_sequences", "priority"),
    COUNT: ("system",),
    RESPONSES: (*SAMPLING, "max_output_tokens", "input", "instructions", "previous_response_id", "max_tool_calls"),
    INPUT_TOKENS: ("input", "instructions"),
    "/tokenize": ("prompt", "model"),
    "/detokenize": ("tokens",),
    BATCHES: ("input_file_id", "endpoint", "metadata"),
}
NESTED = {
    CHAT: (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": P}], "name": P}]},
        {"messages": [USER, {"role": "assistant", "content": P, "reasoning_content": P}, USER]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": P},
            ]
        },
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"tools": [{"type": "function", "function": STRICT}], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "regex", "regex": P}},
        {"logit_bias": {"5": P}},
        {"logit_bias": {P: 1}},
        {"stop_token_ids": [P]},
        {"metadata": {P: P}},
    ),
    COMPLETIONS: ({"prompt": [P]}, {"prompt": [[P]]}, {"prompt": "a", "suffix": P}, {"logit_bias": {P: P}}),
    MESSAGES: (
        {"messages": [USER, {"role": "assistant", "content": THOUGHT}, {"role": "user", "content": RESULT}]},
        {"tools": [{"name": "f", "description": P, "input_schema": SCHEMA, "strict": True}]},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"thinking": {"type": "enabled", "budget_tokens": P}},
        {"metadata": {"user_id": P}},
    ),
    COUNT: ({"messages": [{"role": "user", "content": P}]},),
    RESPONSES: (
        {"input": CALLED},
        {"tools": [{"type": "function", **STRICT}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
        {"metadata": {P: P}},
    ),
    INPUT_TOKENS: ({"input": CALLED},),
    "/tokenize": ({"prompt": None, "messages": [{"role": "user", "content": P}]},),
    "/detokenize": ({"tokens": [P]},),
    BATCHES: ({"metadata": {P: P}},),
}
UNREADABLE = [
    *("1e400", "-1e400", "1" + "0" * 400, "-" + "9" * 5000, "NaN", "Infinity", "-Infinity"),
    *(r'"\ud800"', r'"a\udfffb"', r'{"\udc00\ud800": 1}', "[" * 200 + "]" * 200, "[" * 100_000 + "]" * 100_000),
]
READABLE = [
    *(
        str(2**63),
        str(-(2**63)),
        str(2**64),
        "1" + "0" * 300,
        "1e308",
        "-1e308",
        "5e-324",
        "-0.0",
        "-1",
        "true",
        "[]",
        "{}",
    ),
    *(r'"\u0000"', r'"\uffff"', r'"\ud83d\ude00"', '""', "[" * 80 + "]" * 80, '{"a":' * 80 + "1" + "}" * 80),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[ScriptedService, httpx.Client]]:
    """A router that has batches as well."""
    service = ScriptedService()
    config = RouterConfig(batches=BatchesConfig(dir=str(tmp_path_factory.mktemp("batches"))))
    with (
        serving(create_app(service, load_codec(), config, max_model_len=CONTEXT_LIMIT)) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield service, http


def bodies_of(path: str) -> Iterator[str]:
    """JSON texts with the mark in one field each."""
    for fields in (*({name: P} for name in FIELDS[path]), *NESTED[path]):
        yield json.dumps(GOOD[path] | fields)


def with_value(text: str, value: str) -> str:
    """The text with the value in every place; in that of a key only when it is a text."""
    as_key = value if value.startswith('"') else f'"{P}"'
    return text.replace(f'"{P}":', f"{as_key}:").replace(f'"{P}"', value)


@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_json_is_400_wherever_it_stands(server, path):
    _, http = server
    for text in bodies_of(path):
        for value in UNREADABLE:
            response = http.post(path, content=with_value(text, value))

            assert response.status_code == 400, (text, value[:40], response.text)
            assert "the request body" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", GOOD)
def test_the_ends_of_what_is_json_never_give_500(server, path):
    _, http = server
    for text in bodies_of(path):
        for value in READABLE:
            response = http.post(path, content=with_value(text, value))

            assert response.status_code < 500, (text, value[:40], response.text)
            assert response.status_code == 200 or response.json()["error"]["message"]


def arguments_in(path: str, body: dict) -> str:
    if path == CHAT:
        return body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    if path == MESSAGES:
        return json.dumps(body["content"][-1]["input"])
    return body["output"][-1]["arguments"]


def streamed_arguments(path: str, text: str) -> str:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == CHAT:
        calls = [call for event in events for c in event["choices"] for call in c["delta"].get("tool_calls") or []]
        return "".join(call["function"].get("arguments", "") for call in calls)
    if path == MESSAGES:
        return "".join(event.get("delta", {}).get("partial_json", "") for event in events)
    return "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("value", UNREADABLE[:-1], ids=lambda value: value[:12])
def test_what_the_model_writes_of_it_becomes_a_text(server, path, value):
    service, http = server
    block = f'<{MARK}parameter name="a" string="false">{value}</{MARK}parameter>'
    service.script = says(f'<{MARK}tool_calls>\n<{MARK}invoke name="f">\n{block}\n</{MARK}invoke>\n</{MARK}tool_calls>')
    tool = {
        CHAT: {"type": "function", "function": {"name": "f"}},
        MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
        RESPONSES: {"type": "function", "name": "f", "parameters": {"type": "object"}},
    }[path]
    off = {"reasoning": {"effort": "none"}} if path == RESPONSES else {"thinking": {"type": "disabled"}}
    body = {**GOOD[path], "tools": [tool], **off}

    whole, streamed = (http.post(path, json={**body, "stream": stream}) for stream in (False, True))

    assert whole.status_code == streamed.status_code == 200
    assert json.loads(arguments_in(path, whole.json())) == {"a": value}
    assert json.loads(streamed_arguments(path, streamed.text)) == {"a": value}


@pytest.mark.parametrize("arguments", ["", "x", "null", *UNREADABLE[:-1]], ids=lambda value: value[:12])
def test_arguments_of_earlier_calls_may_be_anything(server, arguments):
    _, http = server
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    items = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}]
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}

    of_chat = http.post(CHAT, json={"model": MODEL, "messages": [*history[:-1], {**history[-1], "tool_call_id": "1"}]})
    of_responses = http.post(RESPONSES, json={"model": MODEL, "input": [*items, result]})

    for response in (of_chat, of_responses):
        assert response.status_code == 200 or "context length" in response.json()["error"]["message"]
