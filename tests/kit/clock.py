"""Waiting for what happens in another thread or process."""

import time
from collections.abc import Callable

WAIT_LIMIT_S = 60.0


def wait_until(claim: Callable[[], bool], *, limit_s: float = WAIT_LIMIT_S) -> float:
    """Poll until the claim holds. Returns: seconds it took. Raises: AssertionError after `limit_s`."""
    started = time.monotonic()
    while not claim():
        waited_s = time.monotonic() - started
        assert waited_s < limit_s, f"not true within {limit_s} s: {claim}"
        time.sleep(0.01)
    return time.monotonic() - started
