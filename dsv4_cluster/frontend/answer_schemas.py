"""The answers of every endpoint and the two error envelopes as JSON Schemas. Answers may hold more than is listed."""

from typing import Any

from dsv4_cluster.frontend.schemas import (
    BOOLEAN,
    NULL,
    OBJECT,
    STRING,
    Schema,
    answer,
    any_of,
    array,
    one_of,
    or_null,
)

_COUNT: Schema = {"type": "integer", "minimum": 0}
_TIME: Schema = {"type": "integer", "description": "Unix time in seconds"}
_CONST_TRUE: Schema = {"type": "boolean", "enum": [True]}


def _kind(name: str) -> Schema:
    return {"type": "string", "enum": [name]}


def _page(items: Schema) -> Schema:
    return answer(
        {
            "object": _kind("list"),
            "data": array(items),
            "first_id": or_null(STRING),
            "last_id": or_null(STRING),
            "has_more": BOOLEAN,
        }
    )


def _deleted(kind: str) -> Schema:
    return answer({"id": STRING, "object": _kind(kind), "deleted": _CONST_TRUE})


OPENAI_ERROR = answer(
    {"error": answer({"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)})}
)
ANTHROPIC_ERROR = answer(
    {"type": _kind("error"), "error": answer({"type": STRING, "message": STRING}), "request_id": STRING}
)
EVENT: Schema = {
    "type": "object",
    "description": "one of the server-sent events",
    "properties": {"event": STRING, "data": {**STRING, "description": "JSON, or [DONE]"}},
    "required": ["data"],
}
_REASONING = answer({"reasoning_tokens": _COUNT})
_COUNTS: dict[str, Schema] = {
    "prompt_tokens": _COUNT,
    "completion_tokens": _COUNT,
    "total_tokens": _COUNT,
    "prompt_tokens_details": answer({"cached_tokens": _COUNT}),
    "prompt_cache_hit_tokens": _COUNT,
    "prompt_cache_miss_tokens": _COUNT,
    "completion_tokens_details": _REASONING,
}
_RESPONSE_USAGE = answer(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": answer({"cached_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": _REASONING,
        "total_tokens": _COUNT,
    }
)
_CALL = answer({"id": STRING, "type": _kind("function"), "function": answer({"name": STRING, "arguments": STRING})})
_CHAT_MESSAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": _kind("assistant"),
        "content": or_null(STRING),
        "reasoning_content": or_null(STRING),
        "tool_calls": or_null(array(_CALL)),
    },
    "required": ["content", "role"],
}
CHAT_COMPLETION = answer(
    {
        "id": STRING,
        "object": _kind("chat.completion"),
        "created": _TIME,
        "model": STRING,
        "choices": array(
            answer(
                {
                    "index": _COUNT,
                    "message": _CHAT_MESSAGE,
                    "logprobs": or_null(OBJECT),
                    "finish_reason": one_of("stop", "length", "tool_calls"),
                }
            ),
            least=1,
        ),
        "usage": answer(_COUNTS),
        "system_fingerprint": or_null(STRING),
    }
)
COMPLETION = answer(
    {
        "id": STRING,
        "object": _kind("text_completion"),
        "created": _TIME,
        "model": STRING,
        "choices": array(
            answer(
                {
                    "index": _COUNT,
                    "text": STRING,
                    "logprobs": or_null(
                        answer(
                            {
                                "tokens": array(STRING),
                                "token_logprobs": array({"type": ["number", "null"]}),
                                "top_logprobs": array(or_null(OBJECT)),
                                "text_offset": array(_COUNT),
                            }
                        )
                    ),
                    "finish_reason": one_of("stop", "length"),
                }
            ),
            least=1,
        ),
        "usage": answer(_COUNTS),
        "system_fingerprint": or_null(STRING),
    }
)
MESSAGE = answer(
    {
        "id": STRING,
        "type": _kind("message"),
        "role": _kind("assistant"),
        "model": STRING,
        "content": array(
            {"type": "object", "properties": {"type": one_of("thinking", "text", "tool_use")}, "required": ["type"]}
        ),
        "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": or_null(STRING),
        "usage": answer(
            {
                "input_tokens": _COUNT,
                "cache_read_input_tokens": _COUNT,
                "output_tokens": _COUNT,
                "output_tokens_details": answer({"thinking_tokens": _COUNT}),
            }
        ),
    }
)
RESPONSE = answer(
    {
        "id": STRING,
        "object": _kind("response"),
        "created_at": _TIME,
        "status": one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        "background": BOOLEAN,
        "model": STRING,
        "store": BOOLEAN,
        "error": or_null(answer({"code": STRING, "message": STRING})),
        "incomplete_details": or_null(OBJECT),
        "output": array(
            {
                "type": "object",
                "properties": {"type": STRING, "id": STRING},
                "required": ["type"],
            }
        ),
        "usage": or_null(_RESPONSE_USAGE),
    }
)
INPUT_ITEMS = _page({"type": "object", "properties": {"id": STRING}, "required": ["id"]})
RESPONSE_DELETED = _deleted("response")
COUNT_TOKENS = answer({"input_tokens": _COUNT})
INPUT_TOKENS = answer({"object": _kind("response.input_tokens"), "input_tokens": _COUNT})
TOKENS: Schema = {
    "type": "object",
    "properties": {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": array(_COUNT),
        "token_strs": array(STRING),
    },
    "required": ["count", "max_model_len", "tokens"],
}
TEXT = answer({"prompt": STRING})
MODEL = answer({"id": STRING, "object": _kind("model"), "created": _TIME, "owned_by": STRING, "max_model_len": _COUNT})
MODELS = answer({"object": _kind("list"), "data": array(MODEL, least=1)})
HEALTH = answer({"status": _kind("ok")})
READY = answer({"status": _kind("ready")})
NOT_READY = answer({"status": _kind("not ready"), "reasons": array(STRING, least=1)})
FILE = answer(
    {
        "id": STRING,
        "object": _kind("file"),
        "bytes": _COUNT,
        "created_at": _TIME,
        "expires_at": NULL,
        "filename": STRING,
        "purpose": one_of("batch", "batch_output"),
        "status": _kind("processed"),
    }
)
FILES = _page(FILE)
FILE_DELETED = _deleted("file")
_REACHED = any_of(_TIME, NULL)
BATCH = answer(
    {
        "id": STRING,
        "object": _kind("batch"),
        "endpoint": STRING,
        "errors": or_null(answer({"object": _kind("list"), "data": array(OBJECT)})),
        "input_file_id": STRING,
        "completion_window": STRING,
        "status": one_of(
            "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
        ),
        "output_file_id": or_null(STRING),
        "error_file_id": or_null(STRING),
        "created_at": _TIME,
        "in_progress_at": _REACHED,
        "expires_at": _REACHED,
        "finalizing_at": _REACHED,
        "completed_at": _REACHED,
        "failed_at": _REACHED,
        "expired_at": _REACHED,
        "cancelling_at": _REACHED,
        "cancelled_at": _REACHED,
        "request_counts": answer({"total": _COUNT, "completed": _COUNT, "failed": _COUNT}),
        "metadata": or_null(OBJECT),
        "model": or_null(STRING),
        "usage": or_null(_RESPONSE_USAGE),
    }
)
BATCHES = _page(BATCH)
