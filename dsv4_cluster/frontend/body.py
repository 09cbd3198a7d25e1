"""Request bodies: bytes under a limit, then one JSON object."""

import asyncio
import json
import re
from typing import Any, Never

from starlette.requests import Request

from dsv4_cluster.errors import InvalidRequestError

MAX_NESTING = 100  # objects and lists inside each other; tool schemas of real clients stay far below
BODY_TIMEOUT_S = 60.0  # a client that takes longer to send its body holds a place for nothing
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


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
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails at half a pair, which is no text
    except UnicodeEncodeError as err:
        raise InvalidRequestError(f"{what} holds half of a surrogate pair, which is not Unicode text") from err
    except UnicodeDecodeError as err:
        raise InvalidRequestError(f"{what} is not UTF-8: {err.reason} at byte {err.start}") from err
    except ValueError as err:
        raise InvalidRequestError(f"{what} is not valid JSON: {err}") from err
    except RecursionError as err:
        raise InvalidRequestError(f"{what} is nested too deeply") from err
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object")
    _check_nesting(value, what)
    return value


def _check_nesting(value: dict[str, Any], what: str) -> None:
    """Raises: InvalidRequestError above MAX_NESTING. Without recursion, which deep input would exhaust."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise InvalidRequestError(f"{what} is nested more than {MAX_NESTING} levels deep")


def _too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(f"the request body exceeds {max_bytes} bytes", http_status=413)


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON value")
