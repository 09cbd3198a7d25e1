import math

import pytest

from dsv4_cluster.bench import engine_report, serve_report
from dsv4_cluster.bench.compare import Metric, compare
from dsv4_cluster.errors import ConfigError


def _speed(value):
    return Metric(value=value, unit="tok/s", is_higher_better=True)


def _latency(value):
    return Metric(value=value, unit="ms", is_higher_better=False)


def test_a_gain_above_one_is_better_in_either_direction():
    changes = compare({"a": _speed(10), "b": _latency(10)}, {"a": _speed(20), "b": _latency(5)}).changes

    assert [(change.gain, change.verdict) for change in changes] == [(2.0, "good"), (2.0, "good")]


def test_worse_is_below_one_and_noise_has_no_verdict():
    changes = compare({"a": _speed(10), "b": _latency(100)}, {"a": _speed(5), "b": _latency(101)}).changes

    assert [change.verdict for change in changes] == ["bad", ""]
    assert changes[0].gain == 0.5


def test_metrics_of_one_side_only_are_named():
    comparison = compare({"a": _speed(1), "gone": _speed(1)}, {"new": _speed(1), "a": _speed(1)})

    assert [change.key for change in comparison.changes] == ["a"]
    assert (comparison.only_before, comparison.only_after) == (("gone",), ("new",))


def test_zero_does_not_divide():
    changes = compare({"a": _speed(0), "b": _speed(0)}, {"a": _speed(1), "b": _speed(0)}).changes

    assert [change.gain for change in changes] == [math.inf, 1.0]


@pytest.mark.parametrize("read", [engine_report.read_baseline, serve_report.read_baseline])
@pytest.mark.parametrize("text", ["", "no json", "[]", '{"schema": "other"}', '{"points": 3}'])
def test_a_file_that_is_no_baseline_is_refused_by_name(tmp_path, read, text):
    path = tmp_path / "old.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"old\.json"):
        read(path)
