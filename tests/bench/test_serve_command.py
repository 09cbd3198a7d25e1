"""`dsv4 bench serve` as a user runs it."""

import json
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

from dsv4_cluster.bench.serve_report import SCHEMA, read_baseline
from dsv4_cluster.cli.main import app
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.scripted_service import says

SMALL = ("--num-requests", "6", "--input-tokens", "5", "--output-tokens", "4", "--warmup", "2")


def _run(*args):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, args)])


def test_json_on_stdout_is_the_report_and_nothing_else(base_url, service):
    result = _run(base_url, *SMALL, "--concurrency", "1,3", "--slo", "ttft:60000", "--json")

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["schema"] == SCHEMA
    assert report["model"] == "deepseek-v4-flash"
    assert [point["label"] for point in report["points"]] == ["1 user", "3 users"]
    for point in report["points"]:
        assert (point["num_requests"], point["num_ok"], point["errors"]) == (6, 6, [])
        assert point["num_output_tokens"] == 6 * len(tokens_of("Hello"))
        assert point["slo_attainment"] == 1.0
        assert point["ttft_ms"]["count"] == 6
        assert len(point["curves"]["e2e_ms"]) == 101
    assert len(service.requests) == 2 + 6 + 6


def test_out_holds_a_page_a_report_and_every_request(base_url, service, tmp_path):
    service.script = lambda _: chunks_of(tokens_of("a b c"), num_cached_tokens=3)

    result = _run(base_url, *SMALL, "--rate", "200", "--api", "completions", "--out", tmp_path / "r")

    assert result.exit_code == 0, result.output
    ET.parse(tmp_path / "r" / "report.html")
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "r" / "requests.jsonl").read_text().splitlines()]
    assert report["points"][0]["label"] == "200 req/s"
    assert report["points"][0]["num_cached_tokens"] == 18
    assert len(lines) == 6
    assert all(line["error_kind"] is None and line["ttft_s"] > 0 and "text" not in line for line in lines)


def test_a_stored_report_is_a_baseline(base_url, service, tmp_path):
    _run(base_url, *SMALL, "--out", tmp_path)

    result = _run(base_url, *SMALL, "--baseline", tmp_path / "report.json")

    assert result.exit_code == 0, result.output
    assert "Against the baseline" in result.stdout
    assert "1 user / TTFT p50" in result.stdout
    assert len(read_baseline(tmp_path / "report.json")) >= 4


def test_no_answer_at_all_is_a_failure(base_url, service):
    service.script = lambda _: [ValueError("broken on purpose")]

    result = _run(base_url, *SMALL)

    assert result.exit_code == 1
    assert "6 of 6 requests failed" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--concurrency", "2", "--rate", "1"), "either --concurrency"),
        (("--concurrency", "two"), "concurrency: 'two'"),
        (("--concurrency", "0"), "concurrency is 0"),
        (("--workload", "other"), "workload is 'other'"),
        (("--api", "soap"), "api is 'soap'"),
        (("--slo", "speed:1"), "slo: unknown name 'speed'"),
        (("--extra-body", "[]"), "extra_body must be"),
        (("--input-tokens", "0"), "input_tokens is 0"),
        (("--baseline", "/nowhere/report.json"), "/nowhere/report.json"),
        (("--api-key-file", "/nowhere/key"), "api_key_file /nowhere/key"),
    ],
)
def test_wrong_input_is_one_clear_line(base_url, service, args, message):
    result = _run(base_url, *args)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert service.requests == []


def test_a_server_that_is_not_there_is_named():
    result = _run("http://127.0.0.1:9")

    assert result.exit_code == 2
    assert "http://127.0.0.1:9/v1/models" in result.stderr


def test_conversations_reach_the_server_through_the_command(base_url, service):
    service.script = says(" yes")

    result = _run(base_url, *SMALL, "--workload", "multi-turn", "--num-turns", "3", "--warmup", "0")

    assert result.exit_code == 0, result.output
    lengths = sorted(len(request.prompt_token_ids) for request in service.requests)
    assert lengths[:2] == [lengths[0]] * 2 and lengths[-1] > lengths[2] > lengths[0]
