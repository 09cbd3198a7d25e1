"""response_format and tool_choice: what reaches the engine, and what is refused before it does."""

import json

import pytest

from dsv4_cluster.protocol.request import StructuredSpec
from tests.kit.codec import chunks_of, load_codec, tokens_of

CHAT = "/v1/chat/completions"
MARK = "｜DSML｜"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("ping", "pong")
]
OFF = {"thinking": {"type": "disabled"}}
PING = {"type": "function", "function": {"name": "ping"}}


def chat(**fields):
    return {"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": "answer in json"}], **fields}


def names_of(spec: StructuredSpec) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(spec.schema)]


@pytest.mark.parametrize("thinking", [{}, OFF], ids=["thinking", "chat"])
@pytest.mark.parametrize(
    ("response_format", "kind", "schema"),
    [
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            "json_schema",
            SCHEMA,
        ),
        ({"type": "regex", "regex": "[a-z]+"}, "regex", "[a-z]+"),
    ],
)
def test_a_response_format_becomes_a_constraint(http, service, thinking, response_format, kind, schema):
    response = http.post(CHAT, json=chat(response_format=response_format, **thinking))

    assert response.status_code == 200, response.text
    request = service.requests[0]
    assert request.structured is not None and request.structured.kind == kind
    assert (json.loads(request.structured.schema) if kind == "json_schema" else request.structured.schema) == schema
    assert request.thinking is (not thinking)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"tools": TOOLS, "tool_choice": "none"}])
def test_plain_requests_have_no_constraint(http, service, fields):
    assert http.post(CHAT, json=chat(**fields)).status_code == 200

    assert service.requests[0].structured is None


@pytest.mark.parametrize("thinking", [{}, OFF], ids=["thinking", "chat"])
@pytest.mark.parametrize(
    ("tool_choice", "kind", "names"),
    [
        ("auto", "tool_call", ["ping", "pong"]),
        ("required", "tool_call_required", ["ping", "pong"]),
        (PING, "tool_call_required", ["ping"]),
    ],
    ids=["auto", "required", "named"],
)
def test_a_tool_choice_becomes_a_constraint_also_while_thinking(http, service, thinking, tool_choice, kind, names):
    response = http.post(CHAT, json=chat(tools=TOOLS, tool_choice=tool_choice, **thinking))

    assert response.status_code == 200, response.text
    request = service.requests[0]
    assert request.structured is not None and request.structured.kind == kind
    assert names_of(request.structured) == names
    assert request.thinking is (not thinking)
    prompt = load_codec().text.decode(request.prompt_token_ids)
    assert prompt.endswith(f"<{MARK}tool_calls>\n") is (thinking is OFF and tool_choice != "auto")


def test_a_forced_call_after_thoughts_is_answered_as_a_call(client, service):
    call = f'\n\n<{MARK}tool_calls>\n<{MARK}invoke name="ping">\n</{MARK}invoke>\n</{MARK}tool_calls>'
    service.script = lambda _: chunks_of(tokens_of(f"hm</think>{call}"))

    answer = client.chat.completions.create(
        model="deepseek-v4-flash", messages=[{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice=PING
    ).choices[0]

    assert answer.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in answer.message.tool_calls] == [("ping", "{}")]
    assert answer.message.reasoning_content == "hm"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "regex", "regex": "(a"}}, "response_format", "regular expression"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
                    },
                }
            },
            "response_format",
            "uniqueItems",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "among tools",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "name a function"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [], "tool_choice": PING}, "tool_choice", "no tools"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "response_format"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_answer_form_that_cannot_be_kept_is_400(http, service, fields, param, words):
    response = http.post(CHAT, json=chat(**fields))

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert service.requests == []


def test_a_strict_tool_passes_with_its_schema(http, service):
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}

    response = http.post(CHAT, json=chat(tools=[tool]))

    assert response.status_code == 200, response.text
    (sent,) = json.loads(service.requests[0].structured.schema)
    assert sent["function"]["strict"] is True and sent["function"]["parameters"]["required"] == ["n"]


def test_a_strict_schema_keeps_keywords_that_the_prompt_drops(http, service):
    kinds = {"type": "integer", "enum": [1, 22]}
    schema = {"type": "object", "properties": {"n": kinds, "o": {"type": "object", "properties": {"k": kinds}}}}
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": schema}}
    as_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}

    for fields in ({"response_format": as_format}, {"tools": [tool]}):
        response = http.post(CHAT, json=chat(**fields))
        assert response.status_code == 200, response.text

    as_answer, (as_tool,) = (json.loads(request.structured.schema) for request in service.requests)
    for sent in (as_answer, as_tool["function"]["parameters"]):
        assert sent["properties"]["n"] == sent["properties"]["o"]["properties"]["k"] == kinds
        for inner in (sent, sent["properties"]["o"]):
            assert inner["additionalProperties"] is False and inner["required"] == list(inner["properties"])


UNIT = {"type": "string", "enum": ["C", "F"]}


def nested(inner: object) -> dict:
    """A strict schema that holds another one at `.properties.a.anyOf[1].items.properties.b`."""
    objects = {"type": "object", "properties": {"u": UNIT, "b": inner}}
    return {
        "type": "object",
        "properties": {"z": UNIT, "a": {"anyOf": [UNIT, {"type": "array", "items": objects}]}},
        "$def": {"unit": UNIT},
    }


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"type": "object", "properties": {"u": {"enum": ["C", "F"]}}}, ".properties.u", "`type`"),
        (nested({"enum": ["C"]}), ".properties.a.anyOf[1].items.properties.b", "`type`"),
        (nested({"type": "array"}), ".properties.a.anyOf[1].items.properties.b", "`items`"),
        (nested({"type": "object", "properties": {"c": UNIT}, "required": []}), ".items.properties.b", "Required"),
        ({"type": "object", "properties": {"u": UNIT}, "additionalProperties": True}, "", "additionalProperties"),
        ({"type": "object", "properties": {}, "$def": {"d": {"const": 1}}}, ".$def.d", "`type`"),
        ({"type": "array", "items": UNIT}, "", "must be an object"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_a_schema_that_strict_mode_does_not_know_is_refused_by_its_place(http, service, schema, place, words):
    function = {"name": "f", "strict": True, "parameters": schema}
    fine = {"name": "g", "strict": True, "parameters": nested(UNIT)}
    tools = [{"type": "function", "function": one} for one in (fine, function)]

    of_chat = http.post(CHAT, json=chat(tools=tools))
    body = {
        "model": "deepseek-v4-flash",
        "input": "hi",
        "tools": [{"type": "function", **one} for one in (fine, function)],
    }
    of_responses = http.post("/v1/responses", json=body)

    for response, start in ((of_chat, "tools[1].function.parameters"), (of_responses, "tools[1].parameters")):
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"].startswith(start) and error["param"].endswith(place)
        assert error["message"].startswith(error["param"]) and words in error["message"]
    assert service.requests == []


def test_a_strict_response_format_is_refused_by_its_place(http):
    form = {"name": "x", "strict": True, "schema": nested({"enum": [1]})}

    of_chat = http.post(CHAT, json=chat(response_format={"type": "json_schema", "json_schema": form}))
    body = {"model": "deepseek-v4-flash", "input": "hi", "text": {"format": {"type": "json_schema", **form}}}
    of_responses = http.post("/v1/responses", json=body)

    place = "schema.properties.a.anyOf[1].items.properties.b"
    assert of_chat.json()["error"]["param"] == f"response_format.json_schema.{place}"
    assert of_responses.json()["error"]["param"] == f"text.format.{place}"


def test_the_place_in_a_very_wide_schema_is_looked_for_in_bounded_time(http):
    wide = {f"p{i}": UNIT for i in range(2500)} | {"last": {"enum": [1]}}
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": wide}}

    response = http.post(CHAT, json=chat(tools=[{"type": "function", "function": function}]))

    assert response.status_code == 400 and response.elapsed.total_seconds() < 5
    assert response.json()["error"]["param"] == "tools[0].function.parameters"


def test_a_prefix_message_cannot_begin_a_constrained_answer(http, service):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab", "prefix": True}]

    response = http.post(CHAT, json=chat(messages=messages, response_format={"type": "regex", "regex": "[a-z]+"}))

    assert response.status_code == 400 and "prefix" in response.json()["error"]["message"]


def test_continuing_content_is_not_thinking(http, service):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab", "prefix": True}]

    assert http.post(CHAT, json=chat(messages=messages)).status_code == 200

    assert service.requests[0].thinking is False
