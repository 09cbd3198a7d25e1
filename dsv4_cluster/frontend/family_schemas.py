"""The bodies of the Messages and the Responses API as JSON Schemas."""

from dsv4_cluster.frontend.body_schemas import (
    EFFORT,
    MAX_ANSWER_TOKENS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    METADATA,
    PRIORITY,
    SEED,
    STOP_STRINGS,
    TEMPERATURE,
    THINKING_BUDGET,
    TOP_P,
    USER_ID,
    sampling,
)
from dsv4_cluster.frontend.field_table import FieldTable
from dsv4_cluster.frontend.message_fields import COUNT_TOKENS, MESSAGES
from dsv4_cluster.frontend.response_fields import INCLUDABLE, INPUT_TOKENS, RESPONSES
from dsv4_cluster.frontend.schemas import (
    BOOLEAN,
    OBJECT,
    STRING,
    Schema,
    any_of,
    array,
    closed,
    of_table,
    one_of,
)

_CACHE_CONTROL: dict[str, Schema] = {"cache_control": OBJECT}
_TEXT_BLOCK = closed(
    {"type": one_of("text"), "text": STRING, "citations": array({}, most=0), **_CACHE_CONTROL}, ("text", "type")
)
_THOUGHTS = (
    closed({"type": one_of("thinking"), "thinking": STRING, "signature": STRING}, ("thinking", "type")),
    closed({"type": one_of("redacted_thinking"), "data": STRING}, ("type",)),
)
_TOOL_USE = closed(
    {"type": one_of("tool_use"), "id": STRING, "name": STRING, "input": OBJECT, "caller": {}, **_CACHE_CONTROL},
    ("id", "input", "name", "type"),
)
_TOOL_RESULT = closed(
    {
        "type": one_of("tool_result"),
        "tool_use_id": STRING,
        "content": any_of(STRING, array(_TEXT_BLOCK)),
        "is_error": BOOLEAN,
        **_CACHE_CONTROL,
    },
    ("tool_use_id", "type"),
)


def _of_role(role: str, *blocks: Schema) -> Schema:
    content = any_of(STRING, array(any_of(_TEXT_BLOCK, *blocks)))
    return closed({"role": one_of(role), "content": content}, ("content", "role"))


_MESSAGE = any_of(_of_role("user", _TOOL_RESULT), _of_role("assistant", *_THOUGHTS, _TOOL_USE), _of_role("system"))
_CLIENT_TOOL = closed(
    {
        "type": one_of("custom"),
        "name": STRING,
        "description": STRING,
        "input_schema": OBJECT,
        "strict": BOOLEAN,
        "eager_input_streaming": BOOLEAN,
        "allowed_callers": {"enum": [["direct"]]},
        "defer_loading": {"enum": [False]},
        "input_examples": array({}, most=0),
        **_CACHE_CONTROL,
    },
    ("input_schema", "name"),
)
_JSON_SCHEMA = closed({"type": one_of("json_schema"), "schema": OBJECT}, ("schema", "type"))
_PROMPT: dict[str, Schema] = {
    "messages": array(_MESSAGE, least=1),
    "system": any_of(STRING, array(_TEXT_BLOCK)),
    "tools": array(_CLIENT_TOOL, most=MAX_TOOLS),
    "tool_choice": closed(
        {"type": one_of("auto", "any", "tool", "none"), "name": STRING, "disable_parallel_tool_use": BOOLEAN},
        ("type",),
    ),
    "thinking": closed(
        {
            "type": one_of("enabled", "adaptive", "disabled"),
            "budget_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
            "display": one_of("summarized", "omitted"),
        },
        ("type",),
    ),
    "output_config": closed({"effort": EFFORT, "format": _JSON_SCHEMA}),
    "output_format": _JSON_SCHEMA,
}
_PART = {
    "type": "object",
    "properties": {"type": one_of("input_text", "output_text", "reasoning_text", "summary_text"), "text": STRING},
    "required": ["text", "type"],
}
_PARTS = any_of(STRING, array(_PART))
_ITEM = {
    "type": "object",
    "properties": {
        "type": one_of(
            "message",
            "reasoning",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
        ),
        "role": one_of("user", "system", "developer", "assistant"),
        "content": any_of(_PARTS, {"type": "null"}),
        "call_id": STRING,
        "name": STRING,
        "arguments": STRING,
        "output": _PARTS,
        "summary": array(_PART),
    },
}
_FUNCTION = closed(
    {
        "type": one_of("function"),
        "name": STRING,
        "description": STRING,
        "parameters": OBJECT,
        "strict": BOOLEAN,
        "allowed_callers": {"enum": [["direct"]]},
        "defer_loading": {"enum": [False]},
    },
    ("name", "type"),
)
_NAMESPACE: Schema = {
    "type": "object",
    "properties": {"type": one_of("namespace"), "name": STRING, "tools": array(_FUNCTION)},
    "required": ["name", "tools", "type"],
}
_BUILT_IN: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "pattern": "^(custom$|web_search)"}},
    "required": ["type"],
}
_RESPONSES_PROMPT: dict[str, Schema] = {
    "input": any_of(STRING, array(_ITEM)),
    "instructions": STRING,
    "previous_response_id": STRING,
    "reasoning": closed({"effort": EFFORT, "summary": {}, "generate_summary": {}}),
    "text": closed(
        {
            "format": closed(
                {
                    "type": one_of("text", "json_object", "json_schema"),
                    "name": STRING,
                    "description": STRING,
                    "schema": OBJECT,
                    "strict": BOOLEAN,
                },
                ("type",),
            ),
            "verbosity": one_of("medium"),
        }
    ),
    "tools": array(any_of(_FUNCTION, _NAMESPACE, _BUILT_IN), most=MAX_TOOLS),
    "tool_choice": any_of(
        one_of("auto", "none", "required"),
        closed({"type": one_of("function", "custom"), "name": STRING}, ("name", "type")),
        closed(
            {"type": one_of("allowed_tools"), "mode": one_of("auto", "required"), "tools": array(OBJECT)},
            ("mode", "tools", "type"),
        ),
    ),
}


def _extra_sampling(vocab_size: int) -> dict[str, Schema]:
    fields = sampling(vocab_size)
    del fields["n"]
    return {**fields, "temperature": TEMPERATURE, "top_p": TOP_P, "seed": SEED, "priority": PRIORITY}


def messages_body(model: Schema, vocab_size: int) -> Schema:
    """`POST /v1/messages`."""
    honoured = {
        **_PROMPT,
        **_extra_sampling(vocab_size),
        "model": model,
        "max_tokens": {"type": "integer", "minimum": 1},
        "metadata": closed({"user_id": USER_ID}),
        "stop_sequences": STOP_STRINGS,
        "stream": BOOLEAN,
    }
    return of_table(MESSAGES, honoured, ("messages", "model"))


def count_tokens_body(model: Schema) -> Schema:
    """`POST /v1/messages/count_tokens`."""
    return of_table(COUNT_TOKENS, {**_PROMPT, "model": model}, ("messages", "model"))


def responses_body(model: Schema, vocab_size: int) -> Schema:
    """`POST /v1/responses`."""
    honoured = {
        **_RESPONSES_PROMPT,
        **_extra_sampling(vocab_size),
        "model": model,
        "background": BOOLEAN,
        "include": array(one_of(*INCLUDABLE)),
        "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_ANSWER_TOKENS},
        "metadata": METADATA,
        "parallel_tool_calls": BOOLEAN,
        "safety_identifier": USER_ID,
        "store": BOOLEAN,
        "stream": BOOLEAN,
        "stream_options": closed({"include_obfuscation": {"enum": [False]}}),
        "thinking_token_budget": THINKING_BUDGET,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "user": USER_ID,
    }
    return _with_input(RESPONSES, honoured)


def input_tokens_body(model: Schema) -> Schema:
    """`POST /v1/responses/input_tokens`."""
    return _with_input(INPUT_TOKENS, {**_RESPONSES_PROMPT, "model": model, "parallel_tool_calls": BOOLEAN})


def _with_input(table: FieldTable, honoured: dict[str, Schema]) -> Schema:
    body = of_table(table, honoured, ("model",))
    return {**body, "anyOf": [{"required": [name]} for name in ("input", "instructions", "previous_response_id")]}
