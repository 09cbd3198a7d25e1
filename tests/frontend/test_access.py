"""Who may come in and how much: keys, quotas, draining, limits of bodies, and what the log says."""

import contextlib
import hashlib
import logging

import httpx
import pytest

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.config.api_config import ApiConfig, ApiKey, UsageLimits
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.frontend.auth import hash_key, new_key
from tests.kit.clock import wait_until
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, load_codec, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import HANG, ScriptedService

MODEL = "deepseek-v4-flash"
ALICE, BOB = new_key(), new_key()
TEXT = "/v1/completions"


def entry(name: str, key: str, **fields) -> ApiKey:
    return ApiKey(name=name, sha256=hash_key(key), **fields)


@pytest.fixture
def start():
    """start(keys=..., ...) -> (service, http client, app, clock); everything ends with the test."""
    with contextlib.ExitStack() as stack:

        def begin(**api):
            service, clock = ScriptedService(), ManualClock()
            config = RouterConfig(max_ongoing_requests=4, api=ApiConfig(**api))
            app = create_app(service, load_codec(), config, max_model_len=CONTEXT_LIMIT, clock=clock)
            url = stack.enter_context(serving(app))
            return service, stack.enter_context(httpx.Client(base_url=url, timeout=20)), app, clock

        yield begin


def ask(http, key=None, **fields):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return http.post(TEXT, json={"model": MODEL, "prompt": "hi", "max_tokens": 8, **fields}, headers=headers)


def test_without_a_known_key_nothing_but_probes_is_answered(start):
    service, http, _, _ = start(keys=(entry("alice", ALICE),))

    for headers in ({}, {"authorization": f"Bearer {BOB}"}, {"authorization": ALICE}, {"x-api-key": b"\xe9"}):
        answer = http.post(TEXT, json={"model": MODEL, "prompt": "hi"}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert http.get("/v1/models").status_code == 401
    assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
    assert service.requests == []


def test_a_key_is_known_in_either_header_and_labels_the_request(start):
    service, http, _, _ = start(keys=(entry("alice", ALICE, tenant="wonderland", priority=-3), entry("bob", BOB)))

    assert ask(http, ALICE).status_code == 200
    body = {"model": MODEL, "prompt": "hi"}
    assert http.post(TEXT, json=body, headers={"x-api-key": BOB}).status_code == 200

    labels = [(r.key_name, r.tenant, r.priority) for r in service.requests]
    assert labels == [("alice", "wonderland", -3), ("bob", "bob", 0)]


def test_a_key_at_its_concurrency_limit_waits_while_others_come_in(start):
    limits = UsageLimits(max_concurrent_requests=1)
    service, http, _, _ = start(keys=(entry("alice", ALICE, limits=limits), entry("bob", BOB)))
    service.script = lambda _: [*chunks_of(tokens_of("a"))[:1], HANG]

    with http.stream(
        "POST",
        TEXT,
        json={"model": MODEL, "prompt": "hi", "stream": True},
        headers={"x-api-key": ALICE},
    ) as held:
        assert held.status_code == 200
        refused = ask(http, ALICE)
        service.script = lambda _: chunks_of(tokens_of("b"))
        other = ask(http, BOB)
    service.wait_until_over(2)

    assert refused.status_code == 429 and "limit is 1" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    assert other.status_code == 200
    wait_until(lambda: ask(http, ALICE).status_code == 200, limit_s=10)


def test_a_tenant_limit_counts_all_of_its_keys(start):
    keys = (entry("alice", ALICE, tenant="t"), entry("bob", BOB, tenant="t"))
    service, http, _, _ = start(keys=keys, tenants={"t": UsageLimits(max_concurrent_requests=1)})
    service.script = lambda _: [*chunks_of(tokens_of("a"))[:1], HANG]
    body = {"model": MODEL, "prompt": "hi", "stream": True}

    with http.stream("POST", TEXT, json=body, headers={"x-api-key": ALICE}):
        assert ask(http, BOB).status_code == 429
    service.wait_until_over(1)


def test_used_tokens_are_paid_back_by_time(start):
    limits = UsageLimits(max_tokens_per_minute=6)
    service, http, _, clock = start(keys=(entry("alice", ALICE, limits=limits), entry("bob", BOB)))
    answer = tokens_of("one two three four five six seven eight")
    service.script = lambda request: chunks_of(answer)

    first, second = ask(http, ALICE), ask(http, ALICE)
    num_used = len(service.requests[0].prompt_token_ids) + sum(len(c.token_ids) for c in chunks_of(answer))
    wait_s = (num_used - 6 + 1) * 10

    assert (first.status_code, second.status_code) == (200, 429)
    assert abs(int(second.headers["retry-after"]) - wait_s) <= 1
    assert ask(http, BOB).status_code == 200
    clock.advance(wait_s - 20)
    assert ask(http, ALICE).status_code == 429
    clock.advance(25)
    assert ask(http, ALICE).status_code == 200


def test_a_draining_router_finishes_what_it_has_and_takes_nothing_new(start):
    service, http, app, _ = start()
    service.script = lambda _: [*chunks_of(tokens_of("a b"))[:1], 0.2, *chunks_of(tokens_of("a b"))[1:]]
    body = {"model": MODEL, "prompt": "hi", "stream": True}

    with http.stream("POST", TEXT, json=body) as running:
        app.state.gate.is_draining = True
        refused = ask(http)
        ready = http.get("/ready")
        text = running.read().decode()

    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "draining"
    assert ready.status_code == 503 and ready.json()["reasons"] == ["this router drains"]
    assert text.rstrip().endswith("data: [DONE]")


def test_a_body_nested_too_deeply_is_400_with_the_limit(start):
    _, http, _, _ = start()

    for depth, status in ((90, 400), (200, 400)):
        value = "[" * depth + "]" * depth
        answer = http.post(TEXT, content=f'{{"model": "{MODEL}", "prompt": "hi", "logit_bias": {value}}}')
        assert answer.status_code == status
        assert ("100 levels" in answer.json()["error"]["message"]) == (depth > 100)


def test_the_log_has_ids_and_numbers_and_no_text(start, caplog):
    service, http, _, _ = start(keys=(entry("alice", ALICE),))
    service.script = lambda _: chunks_of(tokens_of("the secret answer"))
    with caplog.at_level(logging.DEBUG):
        answer = ask(http, ALICE, prompt="the secret question")
        http.get("/nowhere%0Aforged")

    ours = [r.getMessage() for r in caplog.records if r.name.startswith("dsv4_cluster")]
    assert any(answer.headers["x-request-id"] in line and "key=alice" in line and " 200 " in line for line in ours)
    text = "\n".join(ours)
    assert "secret" not in text and ALICE not in text and "\nforged" not in text


def test_web_pages_are_let_in_only_where_configured(start):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    _, closed, _, _ = start()
    _, opened, _, _ = start(cors_allow_origins=("https://a.example",), keys=(entry("alice", ALICE),))

    assert "access-control-allow-origin" not in closed.options(TEXT, headers=preflight).headers
    assert opened.options(TEXT, headers=preflight).headers["access-control-allow-origin"] == "https://a.example"


def test_the_configuration_holds_hashes_and_refuses_what_cannot_work():
    assert hash_key("k") == hashlib.sha256(b"k").hexdigest()
    with pytest.raises(ValueError, match="given to 2 keys"):
        ApiConfig(keys=(entry("a", ALICE), entry("a", BOB)))
    with pytest.raises(ValueError, match="same sha256"):
        ApiConfig(keys=(entry("a", ALICE), entry("b", ALICE)))
    with pytest.raises(ValueError, match="no key belongs"):
        ApiConfig(keys=(entry("a", ALICE),), tenants={"z": UsageLimits()})
