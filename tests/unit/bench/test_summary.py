"""Numbers of a load point from records written by hand."""

import dataclasses

import pytest

from dsv4_cluster.bench.client import RequestRecord
from dsv4_cluster.bench.load import LoadSpec, RunResult
from dsv4_cluster.bench.serve_summary import SLO, summarise
from dsv4_cluster.errors import ConfigError

LOAD = LoadSpec(concurrency=2)


def _record(sent_s=0.0, events=(0.5, 0.75, 1.5), done_s=2.0, num_output_tokens=5, **fields):
    return RequestRecord(
        conversation=0,
        turn=0,
        due_s=sent_s,
        sent_s=sent_s,
        event_s=[sent_s + event for event in events],
        done_s=sent_s + done_s,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=num_output_tokens,
        **fields,
    )


def _failed(kind, message, sent_s=0.0):
    return RequestRecord(
        conversation=0, turn=0, due_s=sent_s, sent_s=sent_s, done_s=sent_s + 1, error_kind=kind, error_message=message
    )


def test_latencies_of_one_record_are_exact():
    record = _record(sent_s=3.0)

    assert record.ttft_s == 0.5
    assert record.itl_s == [0.25, 0.75]
    assert record.tpot_s == 0.25  # 1 s from first to last piece, 4 tokens after the first
    assert record.e2e_s == 2.0


def test_a_single_piece_has_no_time_per_token():
    assert _record(events=(0.5,)).tpot_s is None
    assert _record(num_output_tokens=1).tpot_s is None
    assert _record(events=()).ttft_s is None


def test_a_point_sums_up_its_answered_requests():
    records = (_record(), _record(sent_s=2.0), _failed("http 429", "full", sent_s=3.0))

    point = summarise(LOAD, RunResult(records=records, duration_s=4.0), SLO())

    assert (point.num_requests, point.num_ok) == (3, 2)
    assert (point.num_prompt_tokens, point.num_cached_tokens, point.num_output_tokens) == (20, 8, 10)
    assert point.cached_fraction == 0.4
    assert (point.request_throughput, point.output_throughput, point.total_throughput) == (0.5, 2.5, 7.5)
    assert (point.ttft_ms.p50, point.tpot_ms.p50, point.e2e_ms.p50) == (500, 250, 2000)
    assert (point.itl_ms.count, point.itl_ms.mean) == (4, 500)
    assert point.tokens_per_event == 10 / 6
    assert point.goodput is None


def test_errors_are_counted_by_kind_with_an_example():
    records = (_failed("connect", "a"), _failed("http 429", "full"), _failed("http 429", "fuller"))

    point = summarise(LOAD, RunResult(records=records, duration_s=1.0), SLO())

    assert [(error.kind, error.count) for error in point.errors] == [("http 429", 2), ("connect", 1)]
    assert point.errors[0].example == "full"
    assert point.ttft_ms is None and point.output_throughput == 0


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [(SLO(ttft_ms=500), 2), (SLO(ttft_ms=499), 0), (SLO(tpot_ms=250, e2e_ms=2000), 2), (SLO(e2e_ms=1999), 0)],
)
def test_goodput_counts_requests_within_every_limit(slo, num_good):
    records = (_record(), _record(), _failed("timeout", ""))

    point = summarise(LOAD, RunResult(records=records, duration_s=2.0), slo)

    assert point.goodput == num_good / 2
    assert point.slo_attainment == num_good / 3


def test_the_timeline_holds_all_tokens_and_the_requests_in_flight():
    records = (_record(), _record(sent_s=1.0))

    line = summarise(LOAD, RunResult(records=records, duration_s=3.0), SLO()).timeline

    assert sum(line.output_tokens_per_s) * line.width_s == pytest.approx(10)
    assert max(line.in_flight) == 2
    assert (line.in_flight[0], line.in_flight[-1]) == (1, 1)


def test_an_slo_is_read_from_text():
    assert SLO.parse("ttft:2000, tpot:50") == SLO(ttft_ms=2000, tpot_ms=50)
    assert SLO.parse("") == SLO()
    for text in ("ttft", "ttft:x", "speed:3"):
        with pytest.raises(ConfigError, match="slo"):
            SLO.parse(text)


def test_an_empty_run_has_no_latencies():
    point = summarise(LOAD, RunResult(records=(), duration_s=0.0), SLO(ttft_ms=1))

    assert dataclasses.asdict(point)["e2e_ms"] is None
    assert (point.num_requests, point.goodput, point.slo_attainment) == (0, 0.0, None)
