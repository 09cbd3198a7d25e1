"""JSON files of a checkpoint: config, index and shard headers, read with the same care."""

import json

from dsv4_cluster.errors import CheckpointError


def parse_json_object(text: str | bytes, *, source: str) -> dict[str, object]:
    """Parse one JSON object. A key that is there twice is refused: which of both counts is the parser's whim.

    source: what the message names. Raises: CheckpointError.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except ValueError as err:
        raise CheckpointError(f"{source}: damaged JSON: {err}") from err
    except RecursionError as err:
        raise CheckpointError(f"{source}: damaged JSON: nested too deeply") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} holds {type(value).__name__}, expected a JSON object")
    return value


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} is there twice")
    return found
