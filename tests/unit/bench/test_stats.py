import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_cluster.bench.stats import Summary, bin_counts, percentile

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(SAMPLES, st.integers(0, 100))
def test_percentiles_equal_numpys(samples, percent):
    ours = percentile(sorted(samples), percent)

    assert ours == pytest.approx(np.percentile(samples, percent), rel=1e-9, abs=1e-6)


def test_a_summary_of_known_samples_is_exact():
    summary = Summary.of([4.0, 1.0, 3.0, 2.0, 5.0])

    assert summary == Summary(count=5, mean=3.0, min=1.0, p50=3.0, p90=4.6, p99=4.96, max=5.0, spread=2.0)


def test_no_samples_have_no_summary():
    assert Summary.of([]) is None


def test_bins_hold_every_weight_once():
    bins = bin_counts([0.0, 0.5, 0.99, 1.0, 2.5], [1, 2, 3, 4, 5], end_s=2.5, width_s=1.0)

    assert bins == [6, 4, 5]


@given(st.lists(st.floats(0, 10), max_size=40), st.floats(0.01, 3))
def test_bins_keep_the_total(times, width_s):
    bins = bin_counts(times, [1.0] * len(times), end_s=10.0, width_s=width_s)

    assert sum(bins) == len(times)
