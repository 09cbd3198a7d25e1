"""Messages and tools of a chat body: which of their keys are honoured, and what the conversion gets.

Responses come back as history, so the keys of a response's message are accepted in a request.
"""

from typing import Any

from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.field_table import check_keys

# `name` has no place in the prompt format: a participant's name is accepted and not shown to the model
_EVERY_ROLE = frozenset({"role", "content", "name"})
MESSAGE_KEYS = {
    "assistant": _EVERY_ROLE | {"reasoning_content", "tool_calls", "prefix"},
    "tool": _EVERY_ROLE | {"tool_call_id"},
}
EMPTY_KEYS: dict[str, tuple[Any, ...]] = {
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}
_TEXT_PART = frozenset({"type", "text"})
_CALL = frozenset({"id", "type", "function", "index"})
_CALLED = frozenset({"name", "arguments"})
_TOOL = frozenset({"type", "function"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})


def checked_messages(messages: list[Any], *, ignores_unknown: bool) -> list[Any]:
    """Values of the wrong type are left to the conversion. Raises: FieldError that names the key."""
    return [
        _checked(message, f"messages[{index}]", ignores_unknown=ignores_unknown)
        if isinstance(message, dict)
        else message
        for index, message in enumerate(messages)
    ]


def check_tools(tools: list[Any], *, ignores_unknown: bool) -> None:
    """Raises: FieldError that names the key."""
    for index, tool in enumerate(tools):
        if isinstance(tool, dict):
            check_keys(tool, f"tools[{index}]", _TOOL, ignores_unknown=ignores_unknown)
            if isinstance(tool.get("function"), dict):
                check_keys(tool["function"], f"tools[{index}].function", _FUNCTION, ignores_unknown=ignores_unknown)


def _checked(message: dict[str, Any], name: str, *, ignores_unknown: bool) -> dict[str, Any]:
    role = message.get("role")
    keys = MESSAGE_KEYS.get(role, _EVERY_ROLE) if isinstance(role, str) else _EVERY_ROLE
    check_keys(message, name, keys, EMPTY_KEYS, ignores_unknown=ignores_unknown)
    for key in ("content", "tool_calls"):
        if isinstance(message.get(key), list):
            for index, part in enumerate(message[key]):
                if isinstance(part, dict):
                    check = _check_part if key == "content" else _check_call
                    check(part, f"{name}.{key}[{index}]", ignores_unknown=ignores_unknown)
    if role == "developer":
        message = {**message, "role": "system"}  # OpenAI's newer word for it
    if role == "assistant" and message.get("content") is None and message.get("prefix") is True:
        message = {**message, "content": ""}  # thoughts alone are continued
    return message


def _check_part(part: dict[str, Any], name: str, *, ignores_unknown: bool) -> None:
    kind = part.get("type")
    if kind != "text":
        shown = f"{kind!r:.40}"
        raise FieldError(f"{name} is of type {shown}: DeepSeek V4 reads text only", param=name)
    check_keys(part, name, _TEXT_PART, ignores_unknown=ignores_unknown)


def _check_call(call: dict[str, Any], name: str, *, ignores_unknown: bool) -> None:
    check_keys(call, name, _CALL, ignores_unknown=ignores_unknown)
    if isinstance(call.get("function"), dict):
        check_keys(call["function"], f"{name}.function", _CALLED, ignores_unknown=ignores_unknown)
