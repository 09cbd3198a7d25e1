"""Which forms a parameter value of a DSML call may take under its JSON schema.

Text goes raw (`string="true"`), everything else as JSON (`string="false"`). A string whose schema restricts it by
pattern or format is written as a JSON string, because that grammar is the JSON one.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.structured.json_text import JsonValue, json_rule

RAW_RULE = r"RAW: /(.|\n)*<\//"  # up to and with the "</" in front of the mark
_MAX_REFERENCES = 32
MAX_BRANCHES = 1000
_DEFINITIONS = ("$defs", "definitions")
_STRING_LIMITS = ("pattern", "format", "contentEncoding", "contentMediaType")
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})


@dataclass(frozen=True, slots=True)
class ValueForms:
    """Lark expressions: `raw` ones end with the "</" of the closing tag, `json` ones do not."""

    raw: tuple[str, ...] = ()
    json: tuple[str, ...] = ()


def value_forms(schema: JsonValue, root: Mapping[str, JsonValue]) -> ValueForms:
    """The forms a value may take. root: the tool's whole schema, for its definitions.

    Raises: InvalidRequestError on a reference that leads nowhere or in circles, and on more than MAX_BRANCHES schemas.
    """
    return _forms(schema, root, itertools.count(1))


def _forms(schema: JsonValue, root: Mapping[str, JsonValue], visits: Iterator[int], level: int = 0) -> ValueForms:
    """visits: counts the schemas of one value, which references can multiply. level: of branches in branches."""
    if next(visits) > MAX_BRANCHES or level > _MAX_REFERENCES:
        raise InvalidRequestError(
            f"tools: anyOf and oneOf of a parameter lead to more than {MAX_BRANCHES} schemas, {_MAX_REFERENCES} "
            "levels, or in circles"
        )
    resolved = _resolve(schema, root)
    if resolved is True or (isinstance(resolved, dict) and not resolved.keys() - _ANNOTATIONS):
        return ValueForms(("RAW",), (json_rule({}),))
    if isinstance(resolved, dict):
        branches = next((resolved[key] for key in ("anyOf", "oneOf") if isinstance(resolved.get(key), list)), None)
        others = resolved.keys() - _ANNOTATIONS - {"anyOf", "oneOf", *_DEFINITIONS}
        if isinstance(branches, list) and not others:
            raw = [form for branch in branches for form in _forms(branch, root, visits, level + 1).raw]
            return ValueForms(tuple(dict.fromkeys(raw)), (json_rule(_with_definitions(resolved, root)),))
        raw_forms = _raw_strings(resolved)
        if raw_forms is not None and _is_string_only(resolved):
            return ValueForms(raw_forms)
        return ValueForms(raw_forms or (), (json_rule(_with_definitions(resolved, root)),))
    return ValueForms((), (json_rule(resolved),))


def _resolve(schema: JsonValue, root: Mapping[str, JsonValue]) -> JsonValue:
    """Follow references into the tool's own definitions; the others are left to the JSON grammar."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(schema, dict) or not isinstance(reference, str) or schema.keys() - _ANNOTATIONS != {"$ref"}:
            return schema
        target: JsonValue = dict(root)
        for part in reference.removeprefix("#").split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if target is None or not reference.startswith("#"):
            raise InvalidRequestError(f"tools: the reference {reference[:80]!r} leads nowhere")
        schema = target
    raise InvalidRequestError("tools: references lead in circles")


def _with_definitions(schema: dict[str, JsonValue], root: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    if "$ref" not in json.dumps(schema):
        return schema
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}


def _is_string_only(schema: Mapping[str, JsonValue]) -> bool:
    return schema.get("type", "string") == "string"


def _raw_strings(schema: Mapping[str, JsonValue]) -> tuple[str, ...] | None:
    """Raw forms of the strings that `schema` allows; None when it allows none or restricts them by a pattern."""
    kinds = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str)]
        if kinds is None and len(texts) < len(values):
            return None
        return tuple(f"{json.dumps(text + '</', ensure_ascii=False)}" for text in texts) or None
    allows_strings = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    if not allows_strings or any(key in schema for key in _STRING_LIMITS):
        return None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        raise InvalidRequestError("tools: minLength and maxLength must be integers")
    if least == 0 and most is None:
        return ("RAW",)
    return (rf"/(.|\n){{{least},{'' if most is None else most}}}<\//",)
