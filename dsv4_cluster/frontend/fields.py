"""The fields of chat completions and completions."""

from collections.abc import Mapping
from typing import Any

from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.field_table import FieldTable, check_keys, same
from dsv4_cluster.frontend.sampling_fields import SamplingFields
from dsv4_cluster.tokenizer.family import tool_name

_LABELS = {"user": str, "user_id": str, "metadata": dict}
_BOTH_HONOURED = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs"}
).union(SamplingFields.model_fields)
_CHAT_HONOURED = _BOTH_HONOURED | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "thinking",
    "thinking_token_budget",
    "reasoning_effort",
}
_COMPLETION_HONOURED = _BOTH_HONOURED | {"prompt"}
_REFUSED_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "priority": (0,),
}
_CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    **_REFUSED_EVERYWHERE,
    "store": (False,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "function_call": ("auto", "none"),
}
_COMPLETION_REFUSED: dict[str, tuple[Any, ...]] = {
    **_REFUSED_EVERYWHERE,
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
CHAT = FieldTable(honoured=_CHAT_HONOURED, labels=_LABELS, refused=_CHAT_REFUSED)
COMPLETION = FieldTable(honoured=_COMPLETION_HONOURED, labels=_LABELS, refused=_COMPLETION_REFUSED)


def check_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that conversion gets. Raises: FieldError that names the field."""
    fields = CHAT.taken_from(body)
    _merge_max_tokens(fields)
    _check_stream_options(fields)
    _check_tool_choice(fields)
    _check_response_format(fields.get("response_format"))
    thinking = fields.get("thinking")
    if isinstance(thinking, dict):
        check_keys(thinking, "thinking", {"type"})
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_official_role(message) for message in fields["messages"]]
    return fields


def check_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the honoured fields. Raises: FieldError that names the field."""
    fields = COMPLETION.taken_from(body)
    _check_stream_options(fields)
    return fields


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


def _check_stream_options(fields: dict[str, Any]) -> None:
    if "stream_options" not in fields:
        return
    options = fields["stream_options"]
    if not isinstance(options, dict):
        raise FieldError("stream_options must be an object", param="stream_options")
    if fields.get("stream") is not True:
        raise FieldError("stream_options needs stream = true", param="stream_options")
    check_keys(options, "stream_options", {"include_usage"}, {"include_obfuscation": (False,)})
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


def _check_response_format(value: Any) -> None:
    """Only what would be ignored otherwise; deepseek-recipe checks the rest."""
    if not isinstance(value, dict):
        return
    check_keys(value, "response_format", {"type", "json_schema", "regex"})
    schema = value.get("json_schema")
    if isinstance(schema, dict):
        check_keys(schema, "response_format.json_schema", {"name", "description", "schema", "strict"})


def _official_role(message: Any) -> Any:
    """`developer` is OpenAI's newer word for `system`."""
    if isinstance(message, dict) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message
