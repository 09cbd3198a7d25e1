"""The name somebody may have meant, for messages about a misspelt one."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return ``, did you mean 'x'?`` when a known name is near, else an empty string."""
    close = difflib.get_close_matches(str(name), [str(one) for one in known], n=1)
    return f", did you mean {close[0]!r}?" if close else ""
