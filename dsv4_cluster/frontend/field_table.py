"""Which request fields of an endpoint are honoured, accepted as labels, or refused: nothing is silently ignored.

A refused field is allowed with a value that asks for nothing, because clients send defaults. docs/api.md shows the
same tables; a test compares them.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from dsv4_cluster.frontend.error_body import FieldError

_TYPE_NAMES = {str: "a string", dict: "an object", bool: "a boolean", list: "an array", int: "an integer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """The top-level fields of one endpoint's body.

    honoured: they shape the answer, and their values are checked further on. labels: name -> JSON type of what is
    accepted without effect on the answer. refused: name -> the values that ask for nothing.
    """

    honoured: Set[str]
    labels: Mapping[str, type] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def taken_from(self, body: Mapping[str, Any], *, ignores_unknown: bool = False) -> dict[str, Any]:
        """The honoured fields; null means absent. ignores_unknown: fields that no list has are dropped.

        Raises: FieldError that names the field.
        """
        kept = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in self.honoured:
                kept[name] = value
            elif name in self.labels:
                kind = self.labels[name]
                if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                    raise FieldError(f"{name} must be {_TYPE_NAMES[kind]}", param=name)
            elif name in self.refused:
                if not any(same(value, neutral) for neutral in self.refused[name]):
                    raise FieldError(f"{name} is not supported", param=name)
            elif not ignores_unknown:
                raise FieldError(f"unknown field {name!r}", param=name)
        if "model" in self.honoured and not isinstance(kept.get("model"), str):
            raise FieldError("model must be a string" if "model" in kept else "model is missing", param="model")
        return kept


def same(value: Any, neutral: Any) -> bool:
    """Equality that keeps true and 1 apart."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def check_keys(
    value: Mapping[str, Any],
    name: str,
    honoured: Set[str],
    refused: Mapping[str, tuple[Any, ...]] | None = None,
    *,
    ignores_unknown: bool = False,
) -> None:
    """The same for an object within a field. Raises: FieldError that names the key."""
    for key, inner in value.items():
        if key in honoured or inner is None or (ignores_unknown and key not in (refused or {})):
            continue
        if not any(same(inner, neutral) for neutral in (refused or {}).get(key, ())):
            raise FieldError(f"{name}.{key} is not supported", param=f"{name}.{key}")
