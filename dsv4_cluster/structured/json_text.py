"""JSON schemas as llguidance takes them."""

import json
from collections.abc import Iterator

import llguidance

from dsv4_cluster import strict_json
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.structured.schema_limits import JsonValue, check_limits

# Bounded, because a model that loops over white space never ends its answer; 64 columns of indentation are enough.
_OPTIONS: dict[str, JsonValue] = {"whitespace_pattern": r"[ \n\r\t]{0,64}", "lenient": False, "coerce_one_of": False}
MAX_EXACT = 2**53  # llguidance reads numbers as doubles; values beyond are not these values any more
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_VALUES = frozenset({"const", "enum"})
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def parse_json(text: str, what: str) -> JsonValue:
    """Raises: InvalidRequestError that says where `what` stops being JSON."""
    try:
        value: JsonValue = strict_json.loads(text)
    except ValueError as err:
        raise InvalidRequestError(f"{what} {err}") from err
    return value


def json_grammar(schema: JsonValue) -> str:
    """A whole grammar: one JSON value that follows `schema`."""
    return llguidance.LLMatcher.grammar_from_lark(f"start: {json_rule(schema)}")


def json_rule(schema: JsonValue) -> str:
    """The right side of a Lark rule: one JSON value that follows `schema`.

    Raises: InvalidRequestError when `schema` is no object or boolean, or has numbers, references or patterns that
    cannot be enforced.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"a JSON schema must be an object or a boolean, not {json.dumps(schema)[:40]}")
    _check_numbers(schema)
    check_limits(schema)
    return "%json " + json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)


def _check_numbers(schema: dict[str, JsonValue]) -> None:
    """A range that ends at the lowest 64-bit integer exhausts llguidance's stack, which ends the process: all bounds
    below the exact integers are refused. Bounds above are cut to the largest 64-bit integer, so what follows them
    follows the schema.

    Raises: InvalidRequestError with the keyword and the value.
    """
    waiting: list[JsonValue] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        for key, value in node.items():
            if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
                waiting += value.values()
            elif key in _BOUNDS and not isinstance(value, dict | list):
                _check_number(key, value, lowest=-MAX_EXACT, highest=None)
            elif key in _VALUES:
                for number in _numbers_in(value):
                    _check_number(key, number, lowest=-MAX_EXACT, highest=MAX_EXACT)
            else:  # annotations too: a reference may lead into them
                waiting.append(value)


def _check_number(key: str, value: JsonValue, *, lowest: int, highest: int | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if value < lowest or (highest is not None and value > highest):
        limits = "only bounds from -2**53 up" if highest is None else "only values from -2**53 to 2**53"
        raise InvalidRequestError(
            f"{key} has a number beyond 2**53, {json.dumps(value)[:40]}: {limits} can be enforced"
        )


def _numbers_in(value: JsonValue) -> Iterator[JsonValue]:
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            waiting += inner.values() if isinstance(inner, dict) else inner
        else:
            yield inner
