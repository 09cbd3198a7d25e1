"""JSON that every reader takes the same way: from clients, and from the model.

Python reads more than that: NaN and Infinity, numbers beyond a double (as infinity), half of a surrogate pair, and
nesting that others refuse.
"""

import json
import math
import re
from typing import Any, Never

MAX_NESTING = 100  # objects and lists inside each other; tool schemas of real clients stay far below
_MAX_INTEGER_CHARS = 308  # a double has up to 309 digits
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str) -> Any:
    """The value. Raises: ValueError that continues a sentence about the text, such as "is not valid JSON: ..."."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_bounded)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails at half a pair, which is no text
    except UnicodeEncodeError as err:
        raise ValueError("holds half of a surrogate pair, which is not Unicode text") from err
    except ValueError as err:
        raise ValueError(f"is not valid JSON: {err}") from err
    except RecursionError as err:
        raise ValueError(f"is nested too deeply, at most {MAX_NESTING} levels are read") from err
    if not _is_shallow(value):
        raise ValueError(f"is nested too deeply, at most {MAX_NESTING} levels are read")
    return value


def _is_shallow(value: Any) -> bool:
    """Without recursion, which deep input would exhaust."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > _MAX_INTEGER_CHARS:
        raise ValueError(f"the number {text[:40]}... has {len(text)} characters, at most {_MAX_INTEGER_CHARS} are read")
    return int(text)


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON value")
