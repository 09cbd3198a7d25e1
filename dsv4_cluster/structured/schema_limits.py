"""Limits of JSON schemas that llguidance does not keep itself: its stack, and the cost of patterns that meet.

It follows references by recursion, so a chain of them ends the process. Whether patterns joined by `allOf` leave any
text takes exponential time: 0.1 s for 14, 14 s for 22.
"""

from urllib.parse import unquote

from dsv4_cluster.errors import InvalidRequestError

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
MAX_REFERENCE_LEVELS = 1000  # a process with 8 MB of stack ends between 1920 and 3000
MAX_JOINED_PATTERNS = 8
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_PATTERNS = frozenset({"pattern", "format"})
# Joined with what is around them, or met where they are referred to.
_ELSEWHERE = frozenset({"allOf", "anyOf", "oneOf", "$defs", "definitions"})


def check_limits(schema: dict[str, JsonValue]) -> None:
    """Raises: InvalidRequestError with the number found and the limit."""
    objects = _objects_in(schema)
    targets = {reference: _target(reference, schema) for reference in _references_in(objects)}
    if targets:
        _check_levels(schema, targets)
    num_joined = _num_joined(schema, objects, targets)
    if num_joined > MAX_JOINED_PATTERNS:
        raise InvalidRequestError(
            f"a JSON schema joins {num_joined} patterns or formats by allOf and references, "
            f"at most {MAX_JOINED_PATTERNS} can be enforced together"
        )


def _objects_in(schema: JsonValue) -> list[dict[str, JsonValue]]:
    found: list[dict[str, JsonValue]] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            found.append(node)
        waiting += _children(node)
    return found


def _children(node: JsonValue) -> list[JsonValue]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _references_in(objects: list[dict[str, JsonValue]]) -> set[str]:
    return {value for node in objects for key in _REFERENCES & node.keys() if isinstance(value := node[key], str)}


def _target(reference: str, root: dict[str, JsonValue]) -> JsonValue:
    """What a reference names; the root where that is not a plain path, because nothing is deeper."""
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


def _check_levels(schema: dict[str, JsonValue], targets: dict[str, JsonValue]) -> None:
    """No place is entered twice, so the sum of the depths of all of them bounds the recursion in any order."""
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


def _depth(value: JsonValue) -> int:
    """Levels of objects and arrays inside each other, 0 for a plain value."""
    level, inner = 0, [value]
    while inner := [one for one in inner if isinstance(one, dict | list)]:
        level += 1
        inner = [child for one in inner for child in _children(one)]
    return level


def _num_joined(
    schema: dict[str, JsonValue], objects: list[dict[str, JsonValue]], targets: dict[str, JsonValue]
) -> int:
    """At most how many patterns one text has to follow; references in circles count twice."""
    if not any("allOf" in node for node in objects) and not targets:
        return 0
    joined: dict[int, int] = {}
    order = _inner_first(schema, targets)
    for _ in range(2):
        for node in order:
            joined[id(node)] = _joined_at(node, joined, targets)
    return joined[id(schema)]


def _inner_first(schema: JsonValue, targets: dict[str, JsonValue]) -> list[dict[str, JsonValue]]:
    """Objects after those inside them and those they refer to, as far as there are no circles."""
    order: list[dict[str, JsonValue]] = []
    seen: set[int] = set()
    waiting = [(schema, False)]
    while waiting:
        node, is_left = waiting.pop()
        if is_left and isinstance(node, dict):
            order.append(node)
        elif isinstance(node, dict | list) and id(node) not in seen:
            seen.add(id(node))
            waiting.append((node, True))
            waiting += [(child, False) for child in _children(node)]
            if isinstance(node, dict):
                waiting += [(targets[reference], False) for reference in _references_in([node])]
    return order


def _joined_at(node: dict[str, JsonValue], joined: dict[int, int], targets: dict[str, JsonValue]) -> int:
    def of(inner: JsonValue) -> int:
        if isinstance(inner, list):
            return max(map(of, inner), default=0)
        return joined.get(id(inner), 0) if isinstance(inner, dict) else 0

    num_own = sum(isinstance(node.get(key), str) for key in _PATTERNS)
    num = max(num_own, max((of(value) for key, value in node.items() if key not in _ELSEWHERE), default=0))
    num += max(of(node.get("anyOf")), of(node.get("oneOf")))
    branches = node.get("allOf")
    num += sum(map(of, branches)) if isinstance(branches, list) else of(branches)
    num += sum(of(targets[reference]) for reference in _references_in([node]))
    return min(num, 10**6)
