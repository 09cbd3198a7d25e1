"""Taking the reads of a stream apart: every token once, at the read that completed it, however reads are cut."""

import pytest

from dsv4_cluster.bench.overhead import MARK, StreamLog, summarise

EVENT = b'data: {"choices":[{"delta":{"content":" the"}}]}\n\n'


@pytest.mark.parametrize("size", [1, 7, len(EVENT), 1000])
def test_tokens_are_counted_once_for_every_cut_of_the_stream(size):
    data = EVENT * 5
    log = StreamLog("r", [(float(i), data[i : i + size]) for i in range(0, len(data), size)])

    times = log.token_times_s()

    ends = [k * len(EVENT) + EVENT.index(MARK) + len(MARK) for k in range(5)]
    assert times == [float((end - 1) // size * size) for end in ends]


def test_latency_is_from_the_step_to_the_read_of_the_same_token():
    steps = [10.0, 10.02, 10.04, 10.06, 10.08, 10.10]
    late = (0.001, 0.002, 0.003, 0.004)
    log = StreamLog("r", [(9.9, EVENT), *[(steps[1 + k] + late[k], EVENT) for k in range(4)]])

    result = summarise([log], {"r": 1}, steps, 50.0)

    assert result.num_tokens == 4
    assert result.latency_max_ms == pytest.approx(4.0)
    assert result.latency_p50_ms == pytest.approx(2.5, abs=0.6)
    assert result.delivered_rate == pytest.approx(4 / result.window_s)
