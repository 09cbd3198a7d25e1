"""The bodies of chat completions, completions, tokenization and batches as JSON Schemas."""

from dsv4_cluster.frontend.batches import (
    BATCHES,
    ENDPOINTS,
    MAX_KEY_CHARS,
    MAX_METADATA,
    MAX_VALUE_CHARS,
    WINDOW,
)
from dsv4_cluster.frontend.completion_body import MAX_PROMPTS, MAX_STOP_STRINGS, CompletionBody
from dsv4_cluster.frontend.extra_fields import MAX_USER_ID_BYTES
from dsv4_cluster.frontend.fields import CHAT, COMPLETION, EFFORTS, MAX_PRIORITY, THINKING_TYPES
from dsv4_cluster.frontend.files import PURPOSE
from dsv4_cluster.frontend.sampling_fields import SamplingFields
from dsv4_cluster.frontend.schemas import (
    BOOLEAN,
    NULL,
    OBJECT,
    STRING,
    Schema,
    any_of,
    array,
    closed,
    integer,
    of_model,
    of_table,
    one_of,
    or_null,
    text,
)
from dsv4_cluster.frontend.tokens import DETOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS, TOKENIZE_FIELDS

MAX_ANSWER_TOKENS = 393_216  # deepseek-recipe's bound on max_tokens, like the next two
MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
MAX_INT = 2**31 - 1
TEMPERATURE: Schema = {"type": "number", "minimum": 0, "maximum": 2}
TOP_P: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
SEED = integer(0, 2**63 - 1)
PRIORITY = integer(0, MAX_PRIORITY)
USER_ID = {**text(most=MAX_USER_ID_BYTES), "description": f"at most {MAX_USER_ID_BYTES} bytes of UTF-8"}
STOP_STRINGS = array(text(least=1), most=MAX_STOP_STRINGS)
METADATA: Schema = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_KEY_CHARS},
    "additionalProperties": text(most=MAX_VALUE_CHARS),
}
_STREAM_OPTIONS = closed({"include_usage": BOOLEAN, "include_obfuscation": {"enum": [False]}})
_RESPONSE_FORMAT = closed(
    {
        "type": one_of("text", "json_object", "json_schema", "regex"),
        "json_schema": closed(
            {"name": STRING, "description": STRING, "schema": OBJECT, "strict": BOOLEAN}, ("schema",)
        ),
        "regex": STRING,
    },
    ("type",),
)
_FUNCTION = closed({"name": STRING, "description": STRING, "parameters": OBJECT, "strict": BOOLEAN}, ("name",))
_TOOL = closed({"type": one_of("function"), "function": _FUNCTION}, ("function", "type"))
_CALL = closed(
    {
        "id": STRING,
        "type": one_of("function"),
        "function": closed({"name": STRING, "arguments": STRING}, ("arguments", "name")),
        "index": {"type": "integer"},
    },
    ("function", "id", "type"),
)
_TEXT = any_of(STRING, array(closed({"type": one_of("text"), "text": STRING}, ("text", "type"))))
_EMPTY: dict[str, Schema] = {
    "refusal": {"enum": [""]},
    "annotations": array({}, most=0),
    "audio": NULL,
    "function_call": NULL,
}
_MESSAGES = array(
    any_of(
        closed(
            {"role": one_of("system", "developer", "user"), "content": _TEXT, "name": STRING, **_EMPTY},
            ("content", "role"),
        ),
        closed(
            {
                "role": one_of("assistant"),
                "content": _TEXT,
                "name": STRING,
                "reasoning_content": STRING,
                "tool_calls": array(_CALL, least=1),
                "prefix": BOOLEAN,
                **_EMPTY,
            },
            ("role",),
        ),
        closed(
            {"role": one_of("tool"), "content": _TEXT, "tool_call_id": STRING, "name": STRING, **_EMPTY},
            ("content", "role", "tool_call_id"),
        ),
    ),
    least=1,
)
_CHAT_TOOLS = array(_TOOL, most=MAX_TOOLS)
_NAMED: Schema = {"type": "object", "properties": {"name": STRING}, "required": ["name"]}
_CHAT_CHOICE = any_of(
    one_of("auto", "none", "required"),
    {
        "type": "object",
        "properties": {"type": one_of("function"), "function": _NAMED},
        "required": ["function", "type"],
    },
)
_THINKING = closed({"type": one_of(*THINKING_TYPES)})
EFFORT = one_of(*EFFORTS)
THINKING_BUDGET = integer(0, MAX_INT)


def sampling(vocab_size: int) -> dict[str, Schema]:
    """The fields that every generating endpoint shares, `n` among them."""
    properties = of_model(SamplingFields)
    properties["stop_token_ids"] = array(integer(0, vocab_size - 1))
    properties["logit_bias"]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]*)$"}
    return properties


def chat_body(model: Schema, vocab_size: int) -> Schema:
    """`POST /v1/chat/completions`."""
    max_tokens = integer(1, MAX_ANSWER_TOKENS)
    honoured = {
        **sampling(vocab_size),
        "model": model,
        "messages": _MESSAGES,
        "stream": BOOLEAN,
        "stream_options": _STREAM_OPTIONS,
        "max_tokens": max_tokens,
        "max_completion_tokens": max_tokens,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "seed": SEED,
        "stop": any_of(text(least=1), STOP_STRINGS),
        "logprobs": BOOLEAN,
        "top_logprobs": integer(0, MAX_TOP_LOGPROBS),
        "response_format": _RESPONSE_FORMAT,
        "tools": _CHAT_TOOLS,
        "tool_choice": _CHAT_CHOICE,
        "parallel_tool_calls": BOOLEAN,
        "thinking": _THINKING,
        "thinking_token_budget": THINKING_BUDGET,
        "reasoning_effort": EFFORT,
        "user_id": USER_ID,
        "priority": PRIORITY,
    }
    return of_table(CHAT, honoured, ("messages", "model"))


def completion_body(model: Schema, vocab_size: int) -> Schema:
    """`POST /v1/completions`."""
    token_ids = array(integer(0, vocab_size - 1), least=1)
    one = any_of(STRING, token_ids)
    honoured = {
        **sampling(vocab_size),
        **of_model(CompletionBody),
        "model": model,
        "prompt": any_of(STRING, token_ids, array(one, least=1, most=MAX_PROMPTS)),
        "response_format": _RESPONSE_FORMAT,
        "stream_options": _STREAM_OPTIONS,
        "user_id": USER_ID,
        "priority": PRIORITY,
    }
    return of_table(COMPLETION, honoured, ("model", "prompt"))


def tokenize_body(model: Schema) -> Schema:
    """`POST /tokenize`: text, or a chat."""
    shared = {"model": model, "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN}
    of_text = {**shared, "prompt": STRING}
    of_chat = {
        **shared,
        "messages": _MESSAGES,
        "tools": or_null(_CHAT_TOOLS),
        "tool_choice": or_null(_CHAT_CHOICE),
        "response_format": or_null(_RESPONSE_FORMAT),
        "thinking": or_null(_THINKING),
        "reasoning_effort": or_null(EFFORT),
    }
    known = (TOKENIZE_FIELDS - {"messages"}, (TOKENIZE_FIELDS | TOKENIZE_CHAT_FIELDS) - {"prompt"})
    if (set(of_text), set(of_chat)) != known:
        raise ValueError(f"/tokenize takes {sorted(known[1] | known[0])}")
    return any_of(
        *(
            {"type": "object", "properties": properties, "required": [needed], "additionalProperties": False}
            for properties, needed in ((of_text, "prompt"), (of_chat, "messages"))
        )
    )


def detokenize_body(model: Schema, vocab_size: int) -> Schema:
    """`POST /detokenize`."""
    properties = {"model": model, "tokens": array(integer(0, vocab_size - 1))}
    if set(properties) != DETOKENIZE_FIELDS:
        raise ValueError(f"/detokenize takes {sorted(DETOKENIZE_FIELDS)}")
    return {"type": "object", "properties": properties, "required": ["tokens"], "additionalProperties": False}


def batch_body() -> Schema:
    """`POST /v1/batches`."""
    honoured = {
        "input_file_id": STRING,
        "endpoint": one_of(*ENDPOINTS),
        "completion_window": one_of(WINDOW),
        "metadata": METADATA,
    }
    return of_table(BATCHES, honoured, ("completion_window", "endpoint", "input_file_id"))


def upload_form() -> Schema:
    """The multipart form of `POST /v1/files`."""
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    return {
        "type": "object",
        "properties": {"file": file, "purpose": one_of(PURPOSE)},
        "required": ["file", "purpose"],
        "additionalProperties": False,
    }
