"""Request bodies: bytes under a limit, then one JSON object."""

import asyncio
from typing import Any

from starlette.requests import Request

from dsv4_cluster import strict_json
from dsv4_cluster.errors import InvalidRequestError

BODY_TIMEOUT_S = 60.0  # a client that takes longer to send its body holds a place for nothing


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body. Raises: InvalidRequestError (413 above max_bytes, 408 when it does not arrive in time)."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise InvalidRequestError(
            f"the request body did not arrive within {BODY_TIMEOUT_S} s", http_status=408
        ) from None
    return bytes(body)


def parse_object(body: bytes, what: str = "the request body") -> dict[str, Any]:
    """Parse a JSON object. what: its name in messages. Raises: InvalidRequestError that says where it is wrong."""
    try:
        value = strict_json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as err:
        raise InvalidRequestError(f"{what} is not UTF-8: {err.reason} at byte {err.start}") from err
    except ValueError as err:
        raise InvalidRequestError(f"{what} {err}") from err
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object")
    return value


def _too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(f"the request body exceeds {max_bytes} bytes", http_status=413)
