"""The constraint that a chat body asks for, from what deepseek-recipe derives and from the client's own schemas.

The conversion rewrites strict schemas for the prompt and drops keywords on the way, such as the `enum` of an integer.
The constraint keeps all of them.
"""

import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.request import StructuredKind, StructuredSpec

_KINDS: dict[str, StructuredKind] = {
    "json": "json_schema",
    "regex": "regex",
    "tool_call": "tool_call",
    "tool_call_required": "tool_call_required",
}


def tool_name(value: object) -> str | None:
    """The function name in a tool or in a tool choice; None when there is none."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def answer_form(
    conversion: recipe.ConversationRequest, body: Mapping[str, Any], *, is_call_forced: bool
) -> StructuredSpec | None:
    """The constraint of a converted body. is_call_forced: "auto" was converted in place of a forced tool choice.

    Raises: InvalidRequestError when a prefix message has begun the answer.
    """
    constraint = conversion.inference_options.output_constraint
    if constraint is None:
        return None
    stage = conversion.parsing_options.thinking_initial_stage
    if stage == recipe.ThinkingInitialStage.ContentContinuation:
        raise InvalidRequestError("response_format cannot be combined with a prefix message that begins the content")
    kind = _KINDS[constraint.kind]
    if kind == "json_schema":
        if not constraint.schema:
            return StructuredSpec(kind="json_object")
        return StructuredSpec(kind=kind, schema=_response_schema(constraint.schema, body))
    if kind == "regex":
        return StructuredSpec(kind=kind, schema=constraint.schema)
    schema = _tool_schemas(constraint.schema, body)
    return StructuredSpec(kind="tool_call_required" if is_call_forced else kind, schema=schema)


def _response_schema(converted: str, body: Mapping[str, Any]) -> str:
    own = body["response_format"]["json_schema"]
    return _dumps(_closed(own["schema"])) if own.get("strict") is True else converted


def _tool_schemas(converted: str, body: Mapping[str, Any]) -> str:
    tools = json.loads(converted)
    own = {tool_name(tool): tool["function"] for tool in body["tools"] if tool_name(tool) is not None}
    for tool in tools:
        function = tool["function"]
        if function.get("strict") is True:
            function["parameters"] = _closed(own[function["name"]].get("parameters"))
    return _dumps(tools)


def _closed(schema: Any) -> Any:
    """A strict schema: objects hold their properties, all of them, unless they say otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: _closed(inner) for name, inner in value.items()}
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict)
        else value
        if key in ("enum", "const", "default", "examples")
        else _closed(value)
        for key, value in schema.items()
    }
    properties = closed.get("properties")
    if isinstance(properties, dict):
        closed.setdefault("additionalProperties", False)
        closed.setdefault("required", list(properties))
    return closed


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
