"""`/metrics`: every request is counted once, whatever became of it, and several routers make one page."""

from dataclasses import fields, replace

from prometheus_client.parser import text_string_to_metric_families

from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.metrics.names import ENGINE, PREFIX_CACHE, PREFIX_CACHE_PARTS
from dsv4_cluster.metrics.page import merged_text
from dsv4_cluster.protocol.stats import EngineStats, PrefixCacheStats
from tests.kit.clock import wait_until
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.scripted_service import HANG
from tests.kit.snapshots import snapshot

BODY = {"model": "deepseek-v4-flash", "prompt": "hi", "max_tokens": 8}


def values(text: str) -> dict[tuple, float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_ends_tokens_and_times_are_counted(http, service):
    before = values(http.get("/metrics").text)
    answer = chunks_of(tokens_of("one two"))

    service.script = lambda _: answer
    http.post("/v1/completions", json=BODY)
    service.script = lambda _: [WorkerLostError("gone")]
    http.post("/v1/completions", json=BODY)
    service.script = lambda _: [answer[0], HANG]
    with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
        lines = stream.iter_lines()  # held: the stream closes with it
        next(lines)
        during = values(http.get("/metrics").text)
    ended = ("dsv4_requests_total", "aborted")
    wait_until(lambda: values(http.get("/metrics").text).get(ended, 0) > before.get(ended, 0), limit_s=10)
    http.post("/v1/completions", json={**BODY, "nonsense": 1})
    after = values(http.get("/metrics").text)

    def grown(*key):
        return after[key] - before.get(key, 0)

    num_prompt = len(service.requests[0].prompt_token_ids)
    assert grown("dsv4_requests_total", "stop") == 1
    assert grown("dsv4_requests_total", "WorkerLostError") == 1
    assert grown("dsv4_requests_total", "aborted") == 1
    assert during[("dsv4_requests_in_flight",)] == 1 and after[("dsv4_requests_in_flight",)] == 0
    assert grown("dsv4_prompt_tokens_total") == 3 * num_prompt
    assert grown("dsv4_generated_tokens_total") == sum(len(c.token_ids) for c in answer) + len(answer[0].token_ids)
    assert grown("dsv4_time_to_first_token_seconds_count") == 2
    assert grown("dsv4_request_seconds_count") == 3
    assert grown("dsv4_http_responses_total", "/v1/completions", "200") == 2
    assert grown("dsv4_http_responses_total", "/v1/completions", "400") == 1


def test_unknown_paths_share_one_label(http):
    for path in ("/a", "/b"):
        assert http.get(path).status_code == 404

    text = http.get("/metrics").text
    assert 'route="/a"' not in text and 'route="other",status="404"' in text


def test_pages_of_several_routers_and_the_replicas_become_one():
    page = '# HELP dsv4_requests_total x\n# TYPE dsv4_requests_total counter\ndsv4_requests_total{{reason="stop"}} {}\n'
    loads = [snapshot("p1", role="prefill", num_waiting_tokens=7), snapshot("d1", num_running=3)]

    text = merged_text({"r1": page.format(2.0), "r2": page.format(5.0)}, loads)

    got = values(text)
    assert (got["dsv4_requests_total", "r1", "stop"], got["dsv4_requests_total", "r2", "stop"]) == (2, 5)
    assert text.count("# TYPE dsv4_requests_total counter") == 1
    assert got["dsv4_engine_waiting_tokens", "p1", "prefill"] == 7
    assert got["dsv4_engine_running_sequences", "d1", "decode"] == 3
    assert got["dsv4_host_tier_stored_bytes_total", "d1", "decode"] == 0


def test_evictions_carry_their_reason_and_bytes_their_kind():
    load = snapshot("d1")
    cache = PrefixCacheStats(total_page_evictions=2, total_snapshot_evictions=3, window_bytes=70, state_bytes=8)
    load = replace(load, stats=replace(load.stats, prefix_cache=cache))

    got = values(merged_text({}, [load]))

    assert got["dsv4_prefix_cache_evictions_total", "d1", "decode", "pages"] == 2
    assert got["dsv4_prefix_cache_evictions_total", "d1", "decode", "snapshots"] == 3
    assert got["dsv4_prefix_cache_bytes", "d1", "decode", "windows"] == 70
    assert got["dsv4_prefix_cache_bytes", "d1", "decode", "states"] == 8


def test_every_counter_of_an_engine_is_a_series():
    parts = [field for _, fields_of, _ in PREFIX_CACHE_PARTS.values() for field in fields_of.values()]
    exported = [field for field, _ in (*ENGINE.values(), *PREFIX_CACHE.values())]

    expected = [field.name for stats in (EngineStats, PrefixCacheStats) for field in fields(stats)]
    assert sorted([*exported, *parts, "prefix_cache"]) == sorted(expected)
