"""What a result file holds: which requests have their answer, and the tokens of those answers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_cluster.batches.paced import paced
from dsv4_cluster.batches.record import BatchUsage


@dataclass(slots=True)
class Results:
    """The lines of one file."""

    custom_ids: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)  # names that answers carry
    usage: BatchUsage = field(default_factory=BatchUsage)


def read_results(path: Path) -> Results:
    """All whole lines; the file is cut before the first that is not, behind which nothing was ever durable.

    Raises: OSError.
    """
    found = Results()
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return found
    with file:
        end = 0
        for line in paced(file):
            result = _parsed(line)
            if result is None:
                file.truncate(end)
                break
            end += len(line)
            found.custom_ids.add(result["custom_id"])
            body = (result.get("response") or {}).get("body") or {}
            if "usage" in body:
                found.usage += _usage_of(body["usage"] or {})
                found.models.add(body["model"])
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        result: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return result


def _usage_of(usage: dict[str, Any]) -> BatchUsage:
    """The usage of one answer, in the words of any endpoint."""

    def detail(names: Iterable[str], part: str) -> int:
        return sum((usage.get(name) or {}).get(part, 0) for name in names)

    return BatchUsage(
        num_input_tokens=usage.get("input_tokens", usage.get("prompt_tokens", 0)),
        num_cached_tokens=detail(("input_tokens_details", "prompt_tokens_details"), "cached_tokens"),
        num_output_tokens=usage.get("output_tokens", usage.get("completion_tokens", 0)),
        num_reasoning_tokens=detail(("output_tokens_details", "completion_tokens_details"), "reasoning_tokens"),
    )
