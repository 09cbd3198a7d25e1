"""Reports are single files: well-formed, escaped, and asking the network for nothing."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from dsv4_cluster.bench import engine_page, serve_page
from dsv4_cluster.bench.client import RequestRecord
from dsv4_cluster.bench.compare import compare
from dsv4_cluster.bench.engine_report import EngineRun, Measurement, engine_metrics
from dsv4_cluster.bench.hardware import describe_hardware
from dsv4_cluster.bench.load import LoadSpec, RunResult
from dsv4_cluster.bench.serve_report import ServeReport
from dsv4_cluster.bench.serve_summary import SLO, summarise
from dsv4_cluster.bench.workload import WorkloadSpec

HOSTILE = "</style><script src='http://x'>&\"]]>"
FETCHING_TAGS = {"script", "link", "img", "iframe", "object", "embed", "base", "image", "use"}


def _point(users, *, kind=None, lag_s=0.0):
    records = tuple(
        RequestRecord(
            conversation=i,
            turn=0,
            due_s=i * 0.1,
            sent_s=i * 0.1 + lag_s,
            event_s=[i * 0.1 + lag_s + 0.2 + 0.05 * n for n in range(5)],
            done_s=i * 0.1 + lag_s + 1,
            num_prompt_tokens=10,
            num_output_tokens=5,
            error_kind=kind if i == 0 else None,
            error_message=HOSTILE,
        )
        for i in range(8)
    )
    duration_s = max(record.done_s for record in records)
    return summarise(
        LoadSpec(concurrency=users), RunResult(records=records, duration_s=duration_s), SLO(ttft_ms=300, tpot_ms=90)
    )


def _report(*points, model="m"):
    return ServeReport(
        created="2026-01-02T03:04:05+00:00",
        base_url="http://127.0.0.1:8000",
        api="chat",
        model=model,
        client=describe_hardware(),
        version="0",
        workload=WorkloadSpec(kind="multi-turn", prefix_tokens=7),
        num_warmup=0,
        temperature=1.0,
        burstiness=1.0,
        think_time_s=0.0,
        timeout_s=9.0,
        extra_body={},
        slo=SLO(ttft_ms=300, tpot_ms=90),
        points=points,
    )


def _parsed(text):
    """The document, after checking that nothing in it makes a browser fetch anything."""
    document = ET.fromstring(text)
    for element in document.iter():
        assert element.tag not in FETCHING_TAGS
        assert not {"src", "href", "style", "onload"} & set(element.attrib)
    style = document.find(".//style").text
    assert "url(" not in style and "@import" not in style
    return document


def _text(document):
    return " ".join(document.itertext())


@pytest.mark.parametrize("num_points", [0, 1, 3])
def test_a_serve_report_renders_for_any_number_of_points(num_points):
    report = _report(*(_point(4**index) for index in range(num_points)))

    document = _parsed(serve_page.render_page(report))

    # four distributions (one curve per point), two timelines per point, four sweep plots from two points on
    assert len(document.findall(".//svg")) == {0: 0, 1: 6, 3: 14}[num_points]
    for point in report.points:
        assert f">{point.label}<" in serve_page.render_page(report)


def test_text_from_outside_is_escaped():
    document = _parsed(serve_page.render_page(_report(_point(1, kind=HOSTILE), model=HOSTILE)))

    assert not document.findall(".//script")
    assert _text(document).count(HOSTILE) >= 3  # model name, error kind, error message


def test_failures_and_a_late_client_are_warned_about():
    document = _parsed(serve_page.render_page(_report(_point(1, kind="timeout"), _point(2, lag_s=0.4))))

    warnings = ["".join(p.itertext()) for p in document.findall(".//p[@class='warning']")]
    assert len(warnings) == 2
    assert "1 of 8 requests failed" in warnings[0]
    assert "400 ms late" in warnings[1]


def test_a_quiet_run_has_no_warning():
    assert serve_page.warnings(_report(_point(1))) == []


def test_a_comparison_is_part_of_the_report():
    report, slower = _report(_point(1)), _report(dataclasses.replace(_point(1), output_throughput=1.0))

    text = serve_page.render_page(report, compare(slower.metrics, report.metrics))

    assert "1 user / output throughput" in _text(_parsed(text))
    assert 'class="good"' in text


def test_an_engine_report_renders():
    measurements = [
        Measurement(name=name, params={**params, what: n}, unit="tok/s", is_higher_better=True, samples=(n, n + 2.0))
        for name, params, what in (("prefill", {}, "tokens"), ("decode", {"context": 4}, "batch"))
        for n in (1, 8)
    ]
    run = EngineRun(
        created="2026-01-02T03:04:05+00:00",
        version="0",
        torch_version="0",
        hardware=describe_hardware(),
        checkpoint=HOSTILE,
        shape={"hidden_size": 1},
        dtype="float32",
        kv_cache_dtype="auto",
        num_threads=1,
        read_gb_per_s=1.0,
        num_warmup=0,
        num_repeats=1,
        num_decode_steps=1,
        seed=0,
        unavailable={"speculation": "no MTP layer"},
    )
    metrics = engine_metrics(measurements)

    document = _parsed(engine_page.render_page(run, measurements, compare(metrics, metrics)))

    assert len(document.findall(".//svg")) == 2
    assert "decode context=4 batch=8" in _text(document)
    assert "no MTP layer" in _text(document)
