"""Two runs of the same measurements, side by side."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_NOISE = 0.03  # two runs of the same code on a quiet machine differ by about as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that two runs can share."""

    value: float
    unit: str
    is_higher_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric in both runs. `gain` is above 1 when the later run is better, whatever the metric's direction."""

    key: str
    unit: str
    before: float
    after: float
    gain: float

    @property
    def verdict(self) -> Literal["good", "bad", ""]:
        """Empty for changes that repeated runs show as well."""
        if self.gain > 1 + _NOISE:
            return "good"
        return "bad" if self.gain < 1 - _NOISE else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Changes in the later run's order, and what only one of the runs measured."""

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]


def compare(before: Mapping[str, Metric], after: Mapping[str, Metric]) -> Comparison:
    """Match metrics by key."""
    changes = tuple(_change(key, before[key], metric) for key, metric in after.items() if key in before)
    return Comparison(
        changes=changes,
        only_before=tuple(key for key in before if key not in after),
        only_after=tuple(key for key in after if key not in before),
    )


def _change(key: str, before: Metric, after: Metric) -> Change:
    better, worse = (after.value, before.value) if after.is_higher_better else (before.value, after.value)
    gain = better / worse if worse > 0 else math.inf if better > 0 else 1.0
    return Change(key=key, unit=after.unit, before=before.value, after=after.value, gain=gain)
