"""Limits of JSON schemas that llguidance does not keep itself: its stack, and the cost of patterns that meet.

Whether patterns joined by `allOf` leave any text takes exponential time: 0.1 s for 14, 14 s for 21. That no two names
of `patternProperties` overlap is proved pair by pair: 0.01 s for 64, 0.22 s for 192, more than 2 minutes for 1000.
"""

from collections.abc import Iterable

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.schema_references import (
    JsonValue,
    check_reference_levels,
    children,
    objects_in,
    references_in,
    targets_of,
)

MAX_JOINED_PATTERNS = 8
MAX_PATTERN_PROPERTIES = 64
_PATTERNS = frozenset({"pattern", "format"})
# Joined with what is around them, or met where they are referred to.
_ELSEWHERE = frozenset({"allOf", "anyOf", "oneOf", "$defs", "definitions"})


def check_limits(schema: dict[str, JsonValue]) -> None:
    """Raises: InvalidRequestError with the number found and the limit."""
    check_reference_levels(schema)
    objects = objects_in(schema)
    num_patterns = num_pattern_properties(objects)
    if num_patterns > MAX_PATTERN_PROPERTIES:
        raise InvalidRequestError(
            f"a JSON schema has {num_patterns} names in patternProperties, "
            f"at most {MAX_PATTERN_PROPERTIES} can be enforced"
        )
    targets = targets_of(schema, objects)
    num_joined = _num_joined(schema, objects, targets)
    if num_joined > MAX_JOINED_PATTERNS:
        raise InvalidRequestError(
            f"a JSON schema joins {num_joined} patterns or formats by allOf and references, "
            f"at most {MAX_JOINED_PATTERNS} can be enforced together"
        )


def num_pattern_properties(objects: Iterable[dict[str, JsonValue]]) -> int:
    """Names in `patternProperties` of these objects."""
    patterns = (node.get("patternProperties") for node in objects)
    return sum(len(names) for names in patterns if isinstance(names, dict))


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
            waiting += [(child, False) for child in children(node)]
            if isinstance(node, dict):
                waiting += [(targets[reference], False) for reference in references_in([node])]
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
    num += sum(of(targets[reference]) for reference in references_in([node]))
    return min(num, 10**6)
