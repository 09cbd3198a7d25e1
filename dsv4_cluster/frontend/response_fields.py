"""The fields of `/v1/responses`: what is honoured, and the body that the conversion gets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.extra_fields import EXTRA_SAMPLING, an_object, user_id_of
from dsv4_cluster.frontend.field_table import FieldTable, check_keys
from dsv4_cluster.tokenizer.family import objects

Check: TypeAlias = Callable[..., None]  # check_keys, strict or not
_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_PROMPT_FIELDS = frozenset(
    {"model", "input", "instructions", "previous_response_id", "reasoning", "text", "tools", "tool_choice"}
)
_LABELS = {"max_tool_calls": int, "prompt_cache_key": str, "prompt_cache_retention": str}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}
RESPONSES = FieldTable(
    honoured=_PROMPT_FIELDS
    | EXTRA_SAMPLING
    | {
        "background",
        "include",
        "max_output_tokens",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "safety_identifier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "thinking_token_budget",
        "top_logprobs",
        "top_p",
        "user",
    },
    labels=_LABELS,
    refused=_REFUSED,
)
INPUT_TOKENS = FieldTable(honoured=_PROMPT_FIELDS | {"parallel_tool_calls"}, labels=_LABELS, refused=_REFUSED)
_SWITCHES = ("background", "parallel_tool_calls", "store", "stream")
_ITEMS = frozenset(
    {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
)
_TEXT_PARTS = frozenset({"input_text", "output_text", "reasoning_text", "summary_text"})
_FUNCTION_KEYS = frozenset({"type", "name", "description", "parameters", "strict"})
_FUNCTION_REFUSED: dict[str, tuple[Any, ...]] = {"allowed_callers": (["direct"],), "defer_loading": (False,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFields:
    """A checked body.

    body: for the conversion, with the sampling extensions still in it and without the items of earlier responses.
    items: the input of this request as a list of items. wants_storage: None = as the server does by default.
    """

    body: dict[str, Any]
    items: list[Any]
    previous_response_id: str | None
    wants_storage: bool | None
    is_background: bool
    is_single_call: bool
    user_id: str


def check_responses(
    body: dict[str, Any], table: FieldTable = RESPONSES, *, ignores_unknown: bool = False
) -> ResponseFields:
    """ignores_unknown: keys that this server does not know are dropped. Raises: FieldError that names the field."""
    fields = table.taken_from(body, ignores_unknown=ignores_unknown)
    check = partial(check_keys, ignores_unknown=ignores_unknown)
    for name in _SWITCHES:
        if not isinstance(fields.get(name, False), bool):
            raise FieldError(f"{name} must be a boolean", param=name)
    _check_stream(fields, check)
    _check_metadata(fields.pop("metadata", None))
    _check_include(fields)
    check(an_object(fields.get("reasoning"), "reasoning"), "reasoning", {"effort", "summary", "generate_summary"})
    _check_text(fields, check)
    _check_tools(fields.get("tools"), check)
    _take_choice(fields, check)
    previous = fields.pop("previous_response_id", None)
    if not isinstance(previous, str | None):
        raise FieldError("previous_response_id must be a string", param="previous_response_id")
    ids = [user_id_of(fields.get(name), name) for name in ("safety_identifier", "user")]
    return ResponseFields(
        items=_items(fields.pop("input", None)),
        previous_response_id=previous,
        wants_storage=fields.pop("store", None),
        is_background=fields.pop("background", False),
        is_single_call=fields.pop("parallel_tool_calls", True) is False,
        user_id=ids[0] or ids[1],
        body=fields,
    )


def _check_stream(fields: dict[str, Any], check: Check) -> None:
    options = fields.pop("stream_options", None)
    if options is not None:
        if fields.get("stream") is not True:
            raise FieldError("stream_options needs stream = true", param="stream_options")
        check(an_object(options, "stream_options"), "stream_options", set(), {"include_obfuscation": (False,)})
    if fields.get("background") and fields.get("stream"):
        raise FieldError("background cannot be combined with stream: retrieve the response instead", param="background")
    if fields.get("background") and fields.get("store") is False:
        raise FieldError("background needs store = true", param="background")


def _check_metadata(value: object) -> None:
    metadata = an_object(value, "metadata")
    is_small = len(metadata) <= 16 and all(len(key) <= 64 for key in metadata)
    if not is_small or not all(isinstance(inner, str) and len(inner) <= 512 for inner in metadata.values()):
        raise FieldError(
            "metadata holds at most 16 strings of at most 512 characters, with keys of at most 64", param="metadata"
        )


def _check_include(fields: dict[str, Any]) -> None:
    include = fields.pop("include", None)
    if include is None:
        return
    if not isinstance(include, list):
        raise FieldError("include must be an array", param="include")
    for name in include:
        if name not in INCLUDABLE:
            raise FieldError(f"include holds {name!r:.80}, expected {' or '.join(INCLUDABLE)}", param="include")
    if _LOGPROBS in include:
        fields.setdefault("top_logprobs", 0)


def _check_text(fields: dict[str, Any], check: Check) -> None:
    text = an_object(fields.get("text"), "text")
    check(text, "text", {"format"}, {"verbosity": ("medium",)})
    form = an_object(text.get("format"), "text.format")
    check(form, "text.format", {"type", "name", "description", "schema", "strict"})


def _check_tools(tools: object, check: Check) -> None:
    """Refuse what the conversion would drop. It does drop web search, as the hosted API does."""
    for i, tool in enumerate(objects(tools)):
        where, kind = f"tools[{i}]", tool.get("type")
        if kind == "function":
            check(tool, where, _FUNCTION_KEYS, _FUNCTION_REFUSED)
        elif kind == "namespace":
            for j, inner in enumerate(objects(tool.get("tools"))):
                check(inner, f"{where}.tools[{j}]", _FUNCTION_KEYS, _FUNCTION_REFUSED)
        elif kind != "custom" and not str(kind).startswith("web_search"):
            raise FieldError(f"{where} has the type {kind!r:.60}, which is not supported here", param=where)


def _take_choice(fields: dict[str, Any], check: Check) -> None:
    """`allowed_tools` is a choice among some of the tools. A forced choice needs tools, a named one its tool."""
    choice, tools = fields.get("tool_choice"), objects(fields.get("tools"))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        check(choice, "tool_choice", {"type", "mode", "tools"})
        named = choice.get("tools")
        names = [tool.get("name") for tool in objects(named) if tool.get("type") == "function"]
        if not isinstance(named, list) or len(names) != len(named) or choice.get("mode") not in ("auto", "required"):
            raise FieldError("tool_choice of type allowed_tools needs a mode and function tools", param="tool_choice")
        missing = [name for name in names if name not in [tool.get("name") for tool in tools]]
        if missing:
            raise FieldError(f"tool_choice names {missing[0]!r:.80}, which is not among tools", param="tool_choice")
        tools = [tool for tool in tools if tool.get("name") in names]
        fields.update(tool_choice=choice["mode"], tools=tools)
        choice = choice["mode"]
    if choice != "required" and not isinstance(choice, dict):
        return
    if not tools:
        raise FieldError("tool_choice asks for a tool call, but there are no tools", param="tool_choice")
    if isinstance(choice, dict):
        check(choice, "tool_choice", {"type", "name"})
        if choice.get("name") not in [tool.get("name") for tool in tools if tool.get("type") != "namespace"]:
            raise FieldError(
                f"tool_choice names {choice.get('name')!r:.80}, which is not among tools", param="tool_choice"
            )


def _items(value: Any) -> list[Any]:
    """The input as items. Refuses items and parts that the conversion would drop or replace."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if not isinstance(value, list):
        raise FieldError("input must be a string or an array of items", param="input")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            continue  # for the conversion to refuse
        where, kind = f"input[{i}]", item.get("type", "message")
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise FieldError(f"{where} is an item of type {kind!r:.60}, which is not supported here", param=where)
        for name in ("content", "output", "summary"):
            for j, part in enumerate(objects(item.get(name))):
                of_part = part.get("type")
                if not isinstance(of_part, str) or of_part not in _TEXT_PARTS:
                    raise FieldError(
                        f"{where}.{name}[{j}] is of type {of_part!r:.60}; only text is supported here",
                        param=f"{where}.{name}[{j}]",
                    )
    return value
