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
from dsv4_cluster.tokenizer.family import ClientSchemas

_KINDS: dict[str, StructuredKind] = {
    "json": "json_schema",
    "regex": "regex",
    "tool_call": "tool_call",
    "tool_call_required": "tool_call_required",
}


def answer_form(
    constraint: recipe.OutputConstraint | None,
    parsing: recipe.ParsingOptions,
    schemas: ClientSchemas,
    *,
    is_call_forced: bool,
    is_single_call: bool = False,
) -> StructuredSpec | None:
    """The constraint of a converted body; a strict schema for the text counts also where the conversion knows of none.

    is_call_forced: a tool call is asked for, whatever the conversion made of it. is_single_call: at most one.
    Raises: InvalidRequestError when a prefix message has begun the answer.
    """
    if constraint is None and schemas.response is None:
        return None
    kind = "json_schema" if constraint is None else _KINDS[constraint.kind]
    if parsing.thinking_initial_stage == recipe.ThinkingInitialStage.ContentContinuation:
        raise InvalidRequestError("response_format cannot be combined with a prefix message that begins the content")
    if constraint is None or (kind == "json_schema" and schemas.response is not None):
        assert schemas.response is not None
        return StructuredSpec(kind="json_schema", schema=_dumps(_closed(schemas.response.schema)))
    if kind == "json_schema" and not constraint.schema:
        return StructuredSpec(kind="json_object")
    if kind in ("json_schema", "regex"):
        return StructuredSpec(kind=kind, schema=constraint.schema)
    return StructuredSpec(
        kind="tool_call_required" if is_call_forced else kind,
        schema=_tool_schemas(constraint.schema, schemas),
        is_single_call=is_single_call,
    )


def completion_form(answer: Mapping[str, Any]) -> StructuredSpec | None:
    """The constraint of a `response_format` where no conversion has looked at it; None for plain text.

    Raises: InvalidRequestError.
    """
    kind = answer.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredSpec(kind="json_object")
    if kind == "regex" and isinstance(answer.get("regex"), str):
        return StructuredSpec(kind="regex", schema=answer["regex"])
    own = answer.get("json_schema")
    if kind == "json_schema" and isinstance(own, dict) and isinstance(own.get("schema"), dict):
        schema = _closed(own["schema"]) if own.get("strict") is True else own["schema"]
        return StructuredSpec(kind="json_schema", schema=_dumps(schema))
    raise InvalidRequestError(
        "response_format must be {type: text}, {type: json_object}, {type: regex, regex} or "
        "{type: json_schema, json_schema: {schema}}"
    )


def _tool_schemas(converted: str, schemas: ClientSchemas) -> str:
    tools = json.loads(converted)
    for tool in tools:
        function = tool["function"]
        if function["name"] in schemas.tools:
            function.update(strict=True, parameters=_closed(schemas.tools[function["name"]].schema))
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
