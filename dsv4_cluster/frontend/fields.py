"""The fields of chat completions and completions."""

from collections.abc import Mapping
from typing import Any

from dsv4_cluster.frontend.chat_messages import check_tools, checked_messages
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.extra_fields import user_id_of
from dsv4_cluster.frontend.field_table import FieldTable, check_keys, same
from dsv4_cluster.frontend.sampling_fields import SamplingFields
from dsv4_cluster.tokenizer.family import tool_name

MAX_PRIORITY = 100
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_TYPES = ("enabled", "disabled", "adaptive")
_LABELS = {
    "user": str,
    "metadata": dict,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
}
_BOTH_HONOURED = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logprobs",
        "response_format",
        "user_id",
        "priority",
    }
).union(SamplingFields.model_fields)
_REFUSED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "service_tier": ("auto", "default"),
}
CHAT = FieldTable(
    honoured=_BOTH_HONOURED
    | {
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "thinking",
        "thinking_token_budget",
        "reasoning_effort",
    },
    labels={**_LABELS, "store": bool},
    refused={
        **_REFUSED_EVERYWHERE,
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("auto", "none"),
    },
)
COMPLETION = FieldTable(
    honoured=_BOTH_HONOURED | {"prompt", "suffix", "echo"},
    labels=_LABELS,
    refused={**_REFUSED_EVERYWHERE, "best_of": (1,)},
)


def check_chat(body: Mapping[str, Any], *, ignores_unknown: bool = False) -> dict[str, Any]:
    """Return the body that conversion gets, and what the `take_` functions remove from it.

    ignores_unknown: keys that this server does not know are dropped. Raises: FieldError that names the field.
    """
    fields = CHAT.taken_from(body, ignores_unknown=ignores_unknown)
    _merge_max_tokens(fields)
    _check_stream_options(fields, ignores_unknown=ignores_unknown)
    _check_tool_choice(fields)
    _check_response_format(fields.get("response_format"), ignores_unknown=ignores_unknown)
    _check_thinking(fields, ignores_unknown=ignores_unknown)
    if isinstance(fields.get("messages"), list):
        fields["messages"] = checked_messages(fields["messages"], ignores_unknown=ignores_unknown)
    if isinstance(fields.get("tools"), list):
        check_tools(fields["tools"], ignores_unknown=ignores_unknown)
    return fields


def check_completion(body: Mapping[str, Any], *, ignores_unknown: bool = False) -> dict[str, Any]:
    """Return the honoured fields. Raises: FieldError that names the field."""
    fields = COMPLETION.taken_from(body, ignores_unknown=ignores_unknown)
    _check_stream_options(fields, ignores_unknown=ignores_unknown)
    _check_response_format(fields.get("response_format"), ignores_unknown=ignores_unknown)
    return fields


def take_priority(fields: dict[str, Any]) -> int:
    """Remove priority; it is added to that of the key, so a client can only stand back. Raises: FieldError."""
    value = fields.pop("priority", 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PRIORITY:
        raise FieldError(f"priority must be an integer in 0..{MAX_PRIORITY}; lower runs first", param="priority")
    return value


def take_user_id(fields: dict[str, Any]) -> str:
    """Remove user_id, under which fairness and cached prefixes are kept apart. Raises: FieldError."""
    return user_id_of(fields.pop("user_id", None), "user_id")


def take_thinking_budget(fields: dict[str, Any]) -> int | None:
    """Remove thinking_token_budget, thought tokens after which </think> is forced. Raises: FieldError."""
    value = fields.pop("thinking_token_budget", None)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise FieldError("thinking_token_budget must be an integer >= 0 below 2**31", param="thinking_token_budget")
    return value


def take_single_call(fields: dict[str, Any]) -> bool:
    """Remove parallel_tool_calls; false asks for one call at most. Raises: FieldError."""
    value = fields.pop("parallel_tool_calls", True)
    if not isinstance(value, bool):
        raise FieldError("parallel_tool_calls must be a boolean", param="parallel_tool_calls")
    return not value


def wants_usage(fields: Mapping[str, Any]) -> bool:
    """True when a stream has to end with a usage chunk."""
    options = fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _merge_max_tokens(fields: dict[str, Any]) -> None:
    newer = fields.pop("max_completion_tokens", None)
    if newer is None:
        return
    if "max_tokens" in fields and not same(fields["max_tokens"], newer):
        raise FieldError("max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens")
    fields["max_tokens"] = newer


def _check_stream_options(fields: dict[str, Any], *, ignores_unknown: bool) -> None:
    if "stream_options" not in fields:
        return
    options = fields["stream_options"]
    if not isinstance(options, dict):
        raise FieldError("stream_options must be an object", param="stream_options")
    if fields.get("stream") is not True:
        raise FieldError("stream_options needs stream = true", param="stream_options")
    refused = {"include_obfuscation": (False,)}
    check_keys(options, "stream_options", {"include_usage"}, refused, ignores_unknown=ignores_unknown)
    if not isinstance(options.get("include_usage", False), bool | None):
        raise FieldError("stream_options.include_usage must be a boolean", param="stream_options.include_usage")


def _check_tool_choice(fields: dict[str, Any]) -> None:
    """A forced choice needs tools, and a named one its tool among them."""
    choice = fields.get("tool_choice")
    if choice != "required" and not isinstance(choice, dict):
        return
    tools = fields.get("tools")
    if not isinstance(tools, list) or not tools:
        raise FieldError("tool_choice asks for a tool call, but there are no tools", param="tool_choice")
    if not isinstance(choice, dict):
        return
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError("tool_choice must name a function as {type, function: {name}}", param="tool_choice")
    if function["name"] not in [tool_name(tool) for tool in tools]:
        raise FieldError(f"tool_choice names {function['name']!r:.80}, which is not among tools", param="tool_choice")


def _check_response_format(value: Any, *, ignores_unknown: bool) -> None:
    """Only what would be ignored otherwise; deepseek-recipe checks the rest."""
    if not isinstance(value, dict):
        return
    check_keys(value, "response_format", {"type", "json_schema", "regex"}, ignores_unknown=ignores_unknown)
    schema = value.get("json_schema")
    if isinstance(schema, dict):
        known = {"name", "description", "schema", "strict"}
        check_keys(schema, "response_format.json_schema", known, ignores_unknown=ignores_unknown)


def _check_thinking(fields: dict[str, Any], *, ignores_unknown: bool) -> None:
    thinking = fields.get("thinking")
    if isinstance(thinking, dict):
        check_keys(thinking, "thinking", {"type"}, ignores_unknown=ignores_unknown)
        _check_choice(thinking.get("type"), "thinking.type", THINKING_TYPES)
    _check_choice(fields.get("reasoning_effort"), "reasoning_effort", EFFORTS)


def _check_choice(value: Any, name: str, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise FieldError(f"{name} is {value!r:.40}, expected one of {', '.join(choices)}", param=name)
