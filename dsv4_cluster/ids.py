"""Identifiers: unique, printable, safe in logs, headers and metric labels."""

import uuid


def new_request_id(prefix: str = "req") -> str:
    """Return a fresh id such as ``req-3f2a…`` (32 hexadecimal digits after the prefix)."""
    return f"{prefix}-{uuid.uuid4().hex}"
