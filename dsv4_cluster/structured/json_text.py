"""JSON schemas as llguidance takes them."""

import json

import llguidance

from dsv4_cluster.errors import InvalidRequestError

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
# Bounded, because a model that loops over white space never ends its answer; 64 columns of indentation are enough.
_OPTIONS: dict[str, JsonValue] = {"whitespace_pattern": r"[ \n\r\t]{0,64}", "lenient": False, "coerce_one_of": False}


def parse_json(text: str, what: str) -> JsonValue:
    """Raises: InvalidRequestError that says where `what` stops being JSON."""
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError) as err:
        reason = "nested too deeply" if isinstance(err, RecursionError) else str(err)
        raise InvalidRequestError(f"{what} is not valid JSON: {reason}") from err
    return value


def json_grammar(schema: JsonValue) -> str:
    """A whole grammar: one JSON value that follows `schema`."""
    return llguidance.LLMatcher.grammar_from_lark(f"start: {json_rule(schema)}")


def json_rule(schema: JsonValue) -> str:
    """The right side of a Lark rule: one JSON value that follows `schema`.

    Raises: InvalidRequestError when `schema` is neither an object nor a boolean.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"a JSON schema must be an object or a boolean, not {json.dumps(schema)[:40]}")
    return "%json " + json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)
