from itertools import pairwise
from statistics import fmean, stdev

import pytest

from dsv4_cluster.bench.load import LoadSpec, arrival_times
from dsv4_cluster.errors import ConfigError

NUM = 4000


def _gaps(burstiness):
    times = [0.0, *arrival_times(NUM, rate=50.0, burstiness=burstiness, seed=1)]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 100.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    gaps = _gaps(burstiness)

    # standard errors of mean and deviation at 4000 gaps are below 4 % of the mean for the burstiest case
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.12)
    assert stdev(gaps) == pytest.approx(burstiness**-0.5 / 50, rel=0.12)


def test_arrivals_follow_from_their_seed():
    assert arrival_times(9, 2.0, 1.0, seed=7) == arrival_times(9, 2.0, 1.0, seed=7)
    assert arrival_times(9, 2.0, 1.0, seed=7) != arrival_times(9, 2.0, 1.0, seed=8)


@pytest.mark.parametrize("fields", [{}, {"concurrency": 1, "rate": 1.0}])
def test_a_load_is_open_or_closed(fields):
    with pytest.raises(ConfigError, match="either concurrency or rate"):
        LoadSpec(**fields)


@pytest.mark.parametrize("fields", [{"concurrency": 0}, {"rate": -1.0}, {"rate": 1.0, "duration_s": 0.0}])
def test_a_load_of_nothing_is_refused(fields):
    with pytest.raises(ConfigError, match="more than 0"):
        LoadSpec(**fields)
