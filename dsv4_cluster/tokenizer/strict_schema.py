"""Where a strict schema breaks the rules of the official conversion, which says what is wrong and not where.

Those rules are narrower than JSON schema: every schema has a `type`, an `anyOf` or a `$ref`, arrays have `items`,
`required` names all properties. None of them is repeated here: smaller schemas are given to the same conversion.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from dsv4_cluster.errors import InvalidRequestError

MAX_PROBES = 1000  # of 20 us; the place in a larger schema is that of the last one that was refused
_BY_NAME = ("properties", "$def")  # of schemas by name; definitions under another key are not looked at
_PLAIN = {"type": "string"}
Refusal: TypeAlias = Callable[[Any], str | None]  # what the conversion says of a whole schema; None: it takes it
_Around: TypeAlias = Callable[[Any], Any]  # an inner schema -> one that holds it


class StrictSchemaError(InvalidRequestError):
    """A strict schema that the model's strict mode does not know; stays inside the router."""

    def __init__(self, message: str, *, param: str) -> None:
        """param: path of the schema in the body."""
        super().__init__(f"{param}: {message}")
        self.param = param


def refused_place(schema: Any, refusal: Refusal) -> tuple[str, str] | None:
    """(path below the schema, what is wrong there); None when the conversion takes the schema."""
    reason = refusal(schema)
    if reason is None:
        return None
    place, node, left = "", schema, MAX_PROBES
    around: _Around = _itself
    while isinstance(node, dict):
        own = refusal(around(_without_inner(node)))
        if own is not None:
            return place, own
        for step, inner, parent in _inner_schemas(node):
            left -= 1
            said = refusal(around(parent(inner)))
            if said is not None:
                place, node, reason, around = place + step, inner, said, partial(_nested, around, parent)
                break
            if left <= 0:
                return place, reason
        else:
            break
    return place, reason


def _without_inner(node: dict[str, Any]) -> dict[str, Any]:
    """The same with nothing to complain about inside."""
    plain = dict(node)
    for key in _BY_NAME:
        if isinstance(node.get(key), dict):
            plain[key] = dict.fromkeys(node[key], _PLAIN)
    if "items" in node:
        plain["items"] = _PLAIN
    if isinstance(node.get("anyOf"), list):
        plain["anyOf"] = [_PLAIN for _ in node["anyOf"]]
    return plain


def _inner_schemas(node: dict[str, Any]) -> Iterator[tuple[str, Any, _Around]]:
    """(step of the path, inner schema, what puts one in its place, the only one of its kind)."""
    bare = {key: value for key, value in _without_inner(node).items() if key != "required"}
    for key in _BY_NAME:
        for name, inner in node[key].items() if isinstance(node.get(key), dict) else ():
            yield f".{key}.{name}", inner, partial(_holding, bare, key, name)
    if "items" in node:
        yield ".items", node["items"], lambda inner: {**bare, "items": inner}
    for index, inner in enumerate(node["anyOf"] if isinstance(node.get("anyOf"), list) else ()):
        yield f".anyOf[{index}]", inner, lambda inner: {**bare, "anyOf": [inner]}


def _holding(bare: dict[str, Any], key: str, name: str, inner: Any) -> dict[str, Any]:
    return {**bare, key: {name: inner}}


def _nested(outer: _Around, parent: _Around, inner: Any) -> Any:
    return outer(parent(inner))


def _itself(inner: Any) -> Any:
    return inner
