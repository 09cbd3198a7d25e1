"""References inside a JSON schema: what they name, and how deep they lead.

Native readers of schemas (deepseek-recipe, llguidance) follow references by recursion, so a long chain of them ends the
process. Whoever hands a client's schema to one checks it here first.
"""

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

from dsv4_cluster.errors import InvalidRequestError

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
MAX_REFERENCE_LEVELS = 1000  # a process with 8 MB of stack ends between 1920 and 3000
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_SCHEMA_KEYS = frozenset({"parameters", "input_schema", "schema"})


def check_reference_levels(schema: dict[str, JsonValue]) -> None:
    """Raises: InvalidRequestError with the number of levels and the limit."""
    targets = targets_of(schema, objects_in(schema))
    if not targets:
        return
    # No place is entered twice, so the sum of the depths of all of them bounds the recursion in any order.
    num_levels = _depth(schema) + len(targets)
    depths: dict[int, int] = {}
    for target in targets.values():
        if num_levels > MAX_REFERENCE_LEVELS:
            break
        if id(target) not in depths:
            depths[id(target)] = _depth(target)
        num_levels += depths[id(target)]
    if num_levels > MAX_REFERENCE_LEVELS:
        raise InvalidRequestError(
            f"the references of a JSON schema lead through {num_levels} levels or more, "
            f"at most {MAX_REFERENCE_LEVELS} are followed"
        )


def schemas_in(fields: Sequence[JsonValue]) -> Iterator[dict[str, JsonValue]]:
    """The schemas of tools and answer formats, as any of the chat APIs spells them."""
    waiting = list(fields)
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        for key, value in node.items() if isinstance(node, dict) else ():
            if key in _SCHEMA_KEYS and isinstance(value, dict):
                yield value
                # A client may name a property like one of the keys; what is inside a schema is part of it.
            else:
                waiting.append(value)


def objects_in(schema: JsonValue) -> list[dict[str, JsonValue]]:
    """Every object, outer ones first."""
    found: list[dict[str, JsonValue]] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            found.append(node)
        waiting += children(node)
    return found


def children(node: JsonValue) -> list[JsonValue]:
    """The values directly inside an object or an array."""
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def references_in(objects: Sequence[Mapping[str, JsonValue]]) -> set[str]:
    """What the objects themselves refer to."""
    return {value for node in objects for key in _REFERENCES & node.keys() if isinstance(value := node[key], str)}


def targets_of(schema: dict[str, JsonValue], objects: Sequence[dict[str, JsonValue]]) -> dict[str, JsonValue]:
    """What each reference in `objects` names; the root where that is not a plain path, because nothing is deeper."""
    return {reference: _target(reference, schema) for reference in references_in(objects)}


def _target(reference: str, root: dict[str, JsonValue]) -> JsonValue:
    head, *path = unquote(reference).split("/")
    node: JsonValue = root
    for part in path if head == "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and len(key) < 9 and int(key) < len(node):
            node = node[int(key)]
        else:
            return root
    return node


def _depth(value: JsonValue) -> int:
    """Levels of objects and arrays inside each other, 0 for a plain value."""
    level, inner = 0, [value]
    while inner := [one for one in inner if isinstance(one, dict | list)]:
        level += 1
        inner = [child for one in inner for child in children(one)]
    return level
