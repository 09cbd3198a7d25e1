"""Fields that Messages and Responses take beyond their own APIs, and end-user ids."""

from typing import Any

from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.sampling_fields import SamplingFields

MAX_USER_ID_BYTES = 512  # the limit of DeepSeek's hosted API
EXTRA_SAMPLING = frozenset(SamplingFields.model_fields) - {"n"} | {"seed"}  # one answer per request in both APIs


def take_seed(fields: dict[str, Any]) -> int | None:
    """Remove `seed`. Raises: FieldError."""
    return integer(fields.pop("seed", None), "seed", lowest=0, limit=2**63)


def integer(value: object, name: str, *, lowest: int, limit: int = 2**31) -> int | None:
    """lowest <= value < limit, or None when it is absent. Raises: FieldError."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value < limit:
        raise FieldError(f"{name} must be an integer >= {lowest} below {limit}", param=name)
    return value


def user_id_of(value: object, name: str) -> str:
    """The id, "" when there is none. Raises: FieldError."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value.encode()) > MAX_USER_ID_BYTES:
        raise FieldError(f"{name} must be a string of at most {MAX_USER_ID_BYTES} bytes", param=name)
    return value


def an_object(value: object, name: str) -> dict[str, Any]:
    """The object, {} when it is absent. Raises: FieldError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FieldError(f"{name} must be an object", param=name)
    return value
