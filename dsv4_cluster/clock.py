"""Time as a value that is passed in, so that leases and deadlines can be tested without sleeping."""

import time
from typing import Protocol


class Clock(Protocol):
    """Anything with a monotonic now."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock; only differences have a meaning."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        self._now_s += seconds
