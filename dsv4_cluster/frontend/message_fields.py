"""The fields of `/v1/messages`: what is honoured, and the body that the conversion gets."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.extra_fields import EXTRA_SAMPLING, an_object, integer, user_id_of
from dsv4_cluster.frontend.field_table import FieldTable, check_keys
from dsv4_cluster.tokenizer.family import objects

Check: TypeAlias = Callable[..., None]  # check_keys, strict or not
_PROMPT_FIELDS = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"}
)
_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
MESSAGES = FieldTable(
    honoured=_PROMPT_FIELDS
    | EXTRA_SAMPLING
    | {"max_tokens", "metadata", "priority", "stop_sequences", "stream", "temperature", "top_p"},
    labels={"cache_control": dict},
    refused=_REFUSED,
)
COUNT_TOKENS = FieldTable(honoured=_PROMPT_FIELDS, labels={"cache_control": dict}, refused=_REFUSED)
_TEXT_BLOCKS = {"text": frozenset({"type", "text", "cache_control"})}
_BLOCKS = {
    **_TEXT_BLOCKS,
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
_TOOL_KEYS = frozenset(
    {"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"}
)
_TOOL_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFields:
    """A checked body. body: for the conversion, with the sampling extensions still in it."""

    body: dict[str, Any]
    thinking_budget: int | None
    hides_thoughts: bool  # thinking blocks arrive empty
    is_single_call: bool
    user_id: str


def check_messages(
    body: dict[str, Any], table: FieldTable = MESSAGES, *, ignores_unknown: bool = False
) -> MessageFields:
    """ignores_unknown: keys that this server does not know are dropped. Raises: FieldError that names the field."""
    fields = table.taken_from(body, ignores_unknown=ignores_unknown)
    check = partial(check_keys, ignores_unknown=ignores_unknown)
    metadata = an_object(fields.pop("metadata", None), "metadata")
    check(metadata, "metadata", {"user_id"})
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [
            _message(message, f"messages[{i}]", check) for i, message in enumerate(fields["messages"])
        ]
    _content(fields.get("system"), "system", _TEXT_BLOCKS, check)
    _take_tools(fields, check)
    choice = _checked_choice(fields, check)
    _merge_format(fields, check)
    thinking = an_object(fields.get("thinking"), "thinking")
    return MessageFields(
        body=fields,
        thinking_budget=_thinking_budget(thinking, fields.get("max_tokens"), check),
        hides_thoughts=thinking.get("display") == "omitted",
        is_single_call=choice.get("disable_parallel_tool_use") is True,
        user_id=user_id_of(metadata.get("user_id"), "metadata.user_id"),
    )


def _message(message: Any, name: str, check: Check) -> Any:
    """Without redacted thoughts, which only their own server can read."""
    if not isinstance(message, dict):
        return message
    check(message, name, {"role", "content"})
    content = message.get("content")
    _content(content, f"{name}.content", _BLOCKS, check)
    if not isinstance(content, list):
        return message
    kept = [block for block in content if not (isinstance(block, dict) and block.get("type") == "redacted_thinking")]
    return {**message, "content": kept or ""}


def _content(content: Any, name: str, blocks: dict[str, frozenset[str]], check: Check) -> None:
    """Refuse blocks and their keys that would be ignored. What is no block at all is for the conversion to refuse."""
    for i, block in enumerate(content if isinstance(content, list) else []):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            continue
        where, kind = f"{name}[{i}]", block["type"]
        if kind not in blocks:
            raise FieldError(f"{where} is a block of type {kind!r:.60}, which is not supported here", param=where)
        check(block, where, blocks[kind], {"citations": ([],)})
        if kind == "tool_result":
            _content(block.get("content"), f"{where}.content", _TEXT_BLOCKS, check)


def _take_tools(fields: dict[str, Any], check: Check) -> None:
    """`custom` is the word for a tool of the client, which the conversion knows without a type only."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return
    for i, tool in enumerate(objects(tools)):
        if tool.get("type") not in (None, "custom"):
            raise FieldError(
                f"tools[{i}] is a server tool ({tool['type']!r:.60}); they are not supported", param="tools"
            )
        check(tool, f"tools[{i}]", _TOOL_KEYS, _TOOL_REFUSED)
    fields["tools"] = [
        {key: value for key, value in tool.items() if key != "type"} if isinstance(tool, dict) else tool
        for tool in tools
    ]


def _checked_choice(fields: dict[str, Any], check: Check) -> dict[str, Any]:
    """A forced choice needs tools, and a named one its tool among them."""
    choice = an_object(fields.get("tool_choice"), "tool_choice")
    check(choice, "tool_choice", {"type", "name", "disable_parallel_tool_use"})
    if not isinstance(choice.get("disable_parallel_tool_use", False), bool | None):
        raise FieldError(
            "tool_choice.disable_parallel_tool_use must be a boolean", param="tool_choice.disable_parallel_tool_use"
        )
    if choice.get("type") not in ("any", "tool"):
        return choice
    names = [tool.get("name") for tool in objects(fields.get("tools"))]
    if not names:
        raise FieldError("tool_choice asks for a tool call, but there are no tools", param="tool_choice")
    if choice["type"] == "tool" and choice.get("name") not in names:
        raise FieldError(f"tool_choice names {choice.get('name')!r:.80}, which is not among tools", param="tool_choice")
    return choice


def _merge_format(fields: dict[str, Any], check: Check) -> None:
    """`output_format` is the older place of `output_config.format`."""
    config = dict(an_object(fields.pop("output_config", None), "output_config"))
    check(config, "output_config", {"effort", "format"})
    older = fields.pop("output_format", None)
    if older is not None:
        if config.get("format") not in (None, older):
            raise FieldError("output_format and output_config.format differ; give one of them", param="output_format")
        config["format"] = older
    form = an_object(config.get("format"), "output_config.format")
    check(form, "output_config.format", {"type", "schema"})
    if form and (form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict)):
        raise FieldError(
            "output_config.format must be {type: 'json_schema', schema: object}", param="output_config.format"
        )
    if config:
        fields["output_config"] = config


def _thinking_budget(thinking: dict[str, Any], max_tokens: Any, check: Check) -> int | None:
    is_enabled = thinking.get("type") == "enabled"
    known = {"type", "display", "budget_tokens"} if is_enabled else {"type", "display"}
    check(thinking, "thinking", known, {"budget_tokens": ()})
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise FieldError("thinking.display must be 'summarized' or 'omitted'", param="thinking.display")
    budget = integer(thinking.get("budget_tokens"), "thinking.budget_tokens", lowest=1)
    if budget is not None and isinstance(max_tokens, int) and budget >= max_tokens:
        raise FieldError(
            f"thinking.budget_tokens is {budget}, but has to be below max_tokens = {max_tokens}",
            param="thinking.budget_tokens",
        )
    return budget
