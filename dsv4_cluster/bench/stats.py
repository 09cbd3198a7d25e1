"""Percentiles and spread of samples. Every number of a report is one of these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Samples in one unit, summed up. `spread` is the interquartile range."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Summary | None":
        """None when there are no samples, so that an absent number never reads as zero."""
        if not samples:
            return None
        ranked = sorted(samples)
        return cls(
            count=len(ranked),
            mean=math.fsum(ranked) / len(ranked),
            min=ranked[0],
            p50=percentile(ranked, 50),
            p90=percentile(ranked, 90),
            p99=percentile(ranked, 99),
            max=ranked[-1],
            spread=percentile(ranked, 75) - percentile(ranked, 25),
        )


def percentile(ranked: Sequence[float], percent: float) -> float:
    """Percentile of sorted samples, linear between neighbours (numpy's default rule). percent: 0 to 100."""
    assert ranked and 0 <= percent <= 100, (len(ranked), percent)
    place = (len(ranked) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def bin_counts(times_s: Sequence[float], weights: Sequence[float], *, end_s: float, width_s: float) -> list[float]:
    """Weight per interval [i * width, (i + 1) * width) until `end_s`. Times outside [0, end_s] are an error."""
    bins = [0.0] * max(1, math.ceil(end_s / width_s))
    for time_s, weight in zip(times_s, weights, strict=True):
        assert 0 <= time_s <= end_s, (time_s, end_s)
        bins[min(int(time_s / width_s), len(bins) - 1)] += weight
    return bins
