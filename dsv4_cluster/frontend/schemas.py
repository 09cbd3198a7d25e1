"""JSON Schemas in short form, and the schema of a body out of its field table. Source: JSON Schema 2020-12."""

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel

from dsv4_cluster.frontend.field_table import FieldTable

Schema: TypeAlias = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
_TYPES: dict[type, Schema] = {
    str: STRING,
    dict: OBJECT,
    bool: BOOLEAN,
    list: {"type": "array"},
    int: {"type": "integer"},
}


def integer(lowest: int, highest: int) -> Schema:
    """lowest <= value <= highest."""
    return {"type": "integer", "minimum": lowest, "maximum": highest}


def text(*, most: int | None = None, least: int | None = None) -> Schema:
    """A string of so many characters."""
    limits = {"maxLength": most, "minLength": least}
    return {**STRING, **{name: limit for name, limit in limits.items() if limit is not None}}


def one_of(*values: str) -> Schema:
    """One of these strings."""
    return {"type": "string", "enum": list(values)}


def array(items: Schema, *, most: int | None = None, least: int | None = None) -> Schema:
    """An array of so many items."""
    limits = {"maxItems": most, "minItems": least}
    return {"type": "array", "items": items, **{name: limit for name, limit in limits.items() if limit is not None}}


def any_of(*schemas: Schema) -> Schema:
    """At least one of these."""
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    """Null is the same as absent."""
    return any_of(schema, NULL)


def closed(properties: Mapping[str, Schema], required: Collection[str] = ()) -> Schema:
    """An object of a request: nothing but these keys. Those that are not required may be null."""
    return {
        "type": "object",
        "properties": {name: one if name in required else or_null(one) for name, one in properties.items()},
        "required": sorted(required),
        "additionalProperties": False,
    }


def answer(properties: Mapping[str, Schema]) -> Schema:
    """An object of an answer: these keys at least."""
    return {"type": "object", "properties": dict(properties), "required": sorted(properties)}


def of_model(model: type[BaseModel]) -> dict[str, Schema]:
    """The properties of a pydantic model without references to other models."""
    properties: dict[str, Schema] = model.model_json_schema()["properties"]
    return {
        name: {key: value for key, value in one.items() if key not in ("title", "default")}
        for name, one in properties.items()
    }


def of_table(table: FieldTable, honoured: Mapping[str, Schema], required: Collection[str]) -> Schema:
    """The body of an endpoint. honoured: the schemas of exactly the table's honoured fields."""
    if set(honoured) != table.honoured:
        raise ValueError(f"schemas and honoured fields differ in {sorted(set(honoured) ^ table.honoured)}")
    labels = {
        name: {**_TYPES[kind], "description": "accepted without effect on the answer"}
        for name, kind in table.labels.items()
    }
    refused = {
        name: {"enum": list(neutral), "description": "not supported; these values ask for nothing"}
        if neutral
        else {**NULL, "description": "not supported"}
        for name, neutral in table.refused.items()
    }
    return closed({**honoured, **labels, **refused}, required)


def opened(schema: Any) -> Any:
    """The same, with unknown keys allowed everywhere."""
    if isinstance(schema, dict):
        return {
            name: opened(inner)
            for name, inner in schema.items()
            if not (name == "additionalProperties" and inner is False)
        }
    return [opened(inner) for inner in schema] if isinstance(schema, list) else schema
