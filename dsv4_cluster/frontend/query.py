"""Query parameters."""

from dsv4_cluster.frontend.error_body import FieldError


def page_limit(value: str | None, *, default: int, largest: int) -> int:
    """The parameter `limit`. Raises: FieldError."""
    if value is None:
        return default
    if not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= largest:
        raise FieldError(f"limit is {value!r:.20}, expected an integer from 1 to {largest}", param="limit")
    return int(value)
