"""Batches of requests: from an uploaded file to the files of answers and errors, with the public client."""

import contextlib
import json
import time

import httpx
import openai
import pytest

from dsv4_cluster.config.api_config import ApiConfig, ApiKey, UsageLimits
from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import OverloadedError, WorkerLostError
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.frontend.auth import hash_key, new_key
from tests.kit.batch_files import OVER, TEXT, line, results, submit, until_over
from tests.kit.clock import wait_until
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, load_codec, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import HANG, ScriptedService

MODEL = "deepseek-v4-flash"
ALICE, BOB = new_key(), new_key()
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FORM = {"file": ("x.jsonl", b"{}")}


class Router:
    """One server on a directory, and clients of it."""

    def __init__(self, stack, directory, *, keys, api, batches):
        self.service = ScriptedService()
        entries = [ApiKey(name=name, sha256=hash_key(key), **api.get(name, {})) for name, key in keys.items()]
        config = RouterConfig(
            max_ongoing_requests=8,
            batches=BatchesConfig(dir=directory, **{"max_concurrent_lines": 4, **batches}),
            api=ApiConfig(keys=entries),
        )
        self.app = create_app(self.service, load_codec(), config, max_model_len=CONTEXT_LIMIT)
        self.url = stack.enter_context(serving(self.app))
        self.stack = stack

    def client(self, key="unused"):
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)
        return self.stack.enter_context(client)

    def http(self):
        return self.stack.enter_context(httpx.Client(base_url=self.url, timeout=20))


@pytest.fixture
def start(tmp_path):
    """start(...) -> Router on this test's directory; everything ends with the test."""
    with contextlib.ExitStack() as stack:

        def begin(*, keys=None, api=None, directory=str(tmp_path), **batches):
            return Router(stack, directory, keys=keys or {}, api=api or {}, batches=batches)

        yield begin


@pytest.mark.parametrize(
    ("endpoint", "fields", "answer"),
    [
        (TEXT, {}, lambda body: body["choices"][0]["text"]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}},
            lambda body: body["choices"][0]["message"]["content"],
        ),
        (
            RESPONSES,
            {"input": "hi", "reasoning": {"effort": "none"}},
            lambda body: body["output"][0]["content"][0]["text"],
        ),
    ],
)
def test_every_request_of_a_file_is_answered_under_its_custom_id(start, endpoint, fields, answer):
    client = start().client()
    batch = submit(client, [line(f"c{i}", endpoint, **fields) for i in range(9)], endpoint, metadata={"a": "b"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"a": "b"})

    done = until_over(client, batch)

    assert (done.status, done.errors, done.error_file_id) == ("completed", None, None)
    assert done.request_counts.to_dict() == {"total": 9, "completed": 9, "failed": 0}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at <= done.expires_at
    found = results(client, done.output_file_id)
    assert set(found) == {f"c{i}" for i in range(9)}
    for one in found.values():
        assert one["id"].startswith("batch_req_") and one["error"] is None
        assert one["response"]["status_code"] == 200 and one["response"]["request_id"].startswith("req-")
        assert answer(one["response"]["body"]) == "Hello"


def test_requests_that_fail_are_in_the_error_file(start):
    router = start()
    client = router.client()
    good, unknown_model, bad_value = line("good"), line("model", model="no-such"), line("value", temperature=9)

    done = until_over(client, submit(client, [good, "", unknown_model, bad_value]))

    assert done.status == "completed"
    assert done.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    assert set(results(client, done.output_file_id)) == {"good"}
    page = router.http().get("/metrics").text
    assert 'dsv4_batch_lines_total{status="404"} 1.0' in page and "dsv4_batches_under_way 0.0" in page
    errors = results(client, done.error_file_id)
    assert {name: one["response"]["status_code"] for name, one in errors.items()} == {"model": 404, "value": 400}
    assert errors["model"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert client.files.retrieve(done.error_file_id).purpose == "batch_output"


def test_a_file_that_is_not_valid_is_refused_with_the_numbers_of_its_lines(start):
    router = start(max_lines_per_file=7)
    client = router.client()
    wrong = [
        line("same"),
        "{not json",
        line("same"),
        {**line("method"), "method": "GET"},
        line("url", CHAT),
        {**line("x"), "custom_id": 3},
        line("stream", stream=True),
        line("too many"),
        line("not even read"),
    ]

    failed = until_over(client, submit(client, wrong))
    empty = until_over(client, submit(client, ["", ""]))

    assert (failed.status, failed.output_file_id, router.service.requests) == ("failed", None, [])
    assert [(one.line, one.code) for one in failed.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_method"),
        (5, "invalid_url"),
        (6, "invalid_custom_id"),
        (7, "unsupported_parameter"),
        (8, "too_many_requests"),
    ]
    assert "line 1" in failed.errors.data[1].message and "7 requests" in failed.errors.data[-1].message
    assert (empty.status, empty.errors.data[0].code) == ("failed", "empty_file")


def test_a_cancelled_batch_keeps_what_is_answered_and_names_the_rest(start):
    router = start()
    client = router.client()
    hello = chunks_of(tokens_of("Hello"))
    router.service.script = lambda request: hello if len(router.service.requests) <= 3 else [*hello[:1], HANG]
    batch = submit(client, [line(f"c{i}") for i in range(12)])
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3, limit_s=20)

    cancelling = client.batches.cancel(batch.id)
    done = until_over(client, batch)

    assert cancelling.status in ("cancelling", "cancelled") and cancelling.cancelling_at
    assert done.status == "cancelled" and done.cancelled_at >= done.cancelling_at
    answered, rest = results(client, done.output_file_id), results(client, done.error_file_id)
    assert len(answered) == 3 and answered.keys() | rest.keys() == {f"c{i}" for i in range(12)}
    assert {one["error"]["code"] for one in rest.values()} == {"batch_cancelled"}
    assert done.request_counts.to_dict() == {"total": 12, "completed": 3, "failed": 9}
    router.service.wait_until_over(7)
    with pytest.raises(openai.ConflictError, match="cancelled and cannot be"):
        client.batches.cancel(batch.id)


def test_no_room_is_waited_for_and_lost_work_is_tried_again(start, monkeypatch):
    monkeypatch.setattr("dsv4_cluster.frontend.batch_run.FIRST_PAUSE_S", 0.01)
    router = start(max_concurrent_lines=1)
    client = router.client()
    failures = [OverloadedError("full")] * 5 + [WorkerLostError("gone")] * 2
    router.service.script = lambda _: [failures.pop(0)] if failures else chunks_of(tokens_of("Hello"))

    done = until_over(client, submit(client, [line("a")]))
    failures += [WorkerLostError("gone again")] * 99
    lost = until_over(client, submit(client, [line("b")]))

    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)
    assert results(client, lost.error_file_id)["b"]["response"]["status_code"] == 503
    assert len(failures) == 96  # router.max_attempts are 3


def test_lines_stand_back_for_other_requests_and_are_few_at_a_time(start):
    router = start(keys={"alice": ALICE}, api={"alice": {"priority": 2, "tenant": "t"}}, priority=40)
    client = router.client(ALICE)
    hello = chunks_of(tokens_of("Hello"))
    in_flight = []

    def script(_):
        in_flight.append(router.app.state.gate.num_in_flight)
        return [0.02, *hello]

    router.service.script = script
    until_over(client, submit(client, [line(f"c{i}") for i in range(20)]))

    requests = router.service.requests
    assert {(r.priority, r.tenant, r.key_name) for r in requests} == {(42, "t", "alice")}
    assert len(requests) == 20 and 1 < max(in_flight) <= 5  # 4 lines, and perhaps our own POST


def test_lines_take_half_of_what_their_key_may_have_and_others_the_rest(start, monkeypatch):
    monkeypatch.setattr("dsv4_cluster.frontend.batch_run.FIRST_PAUSE_S", 0.01)
    limits = UsageLimits(max_concurrent_requests=4)
    router = start(keys={"alice": ALICE}, api={"alice": {"limits": limits}})
    client = router.client(ALICE)
    under_way = []

    def script(_):
        under_way.append(len(router.service.requests) - router.service.num_ended)
        return [0.01, *chunks_of(tokens_of("Hello"))]

    router.service.script = script
    batch = submit(client, [line(f"c{i}") for i in range(40)])
    router.service.wait_until_started()
    while client.batches.retrieve(batch.id).status not in OVER:
        client.completions.create(model=MODEL, prompt="hi")  # never a 429

    done = client.batches.retrieve(batch.id)
    assert done.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
    assert len(router.service.requests) > 40 and max(under_way) <= 3


def test_tenants_do_not_find_each_others_files_and_batches(start):
    router = start(keys={"alice": ALICE, "bob": BOB})
    alice, bob = router.client(ALICE), router.client(BOB)
    batch = submit(alice, [line("a")])
    done = until_over(alice, batch)

    for call in (
        lambda: bob.files.retrieve(batch.input_file_id),
        lambda: bob.files.content(done.output_file_id),
        lambda: bob.files.delete(batch.input_file_id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(input_file_id=batch.input_file_id, endpoint=TEXT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no"):
            call()
    assert bob.files.list().data == [] and bob.batches.list().data == []
    assert {file.id for file in alice.files.list()} == {batch.input_file_id, done.output_file_id}


def test_a_batch_of_a_key_that_is_gone_fails(start):
    first = start(keys={"alice": ALICE, "bob": BOB}, api={"alice": {"tenant": "t"}, "bob": {"tenant": "t"}})
    first.service.script = lambda _: [HANG]
    batch = submit(first.client(ALICE), [line("a")])
    first.service.wait_until_started()
    first.stack.close()

    second = start(keys={"bob": BOB}, api={"bob": {"tenant": "t"}})
    failed = until_over(second.client(BOB), batch)

    assert (failed.status, failed.errors.data[0].code) == ("failed", "invalid_api_key")


def test_lists_are_newest_first_in_pages(start):
    router = start()
    client = router.client()
    made = []
    for _ in range(5):
        made.append(submit(client, [line("a")]).id)
        time.sleep(0.002)  # ids sort by the millisecond

    page = client.batches.list(limit=2)
    assert [one.id for one in page.data] == made[:-3:-1] and page.has_more
    assert [one.id for one in client.batches.list(limit=2)] == made[::-1]  # the client follows the pages
    inputs = client.files.list(purpose="batch", order="asc", limit=3)
    assert len(inputs.data) == 3 and inputs.has_more
    assert len(list(inputs)) == 5
    assert router.http().get("/v1/batches", params={"limit": "0"}).status_code == 400


def test_a_deleted_file_is_gone_and_its_batch_goes_on(start):
    router = start()
    client = router.client()
    router.service.script = lambda _: [0.05, *chunks_of(tokens_of("Hello"))]
    batch = submit(client, [line(f"c{i}") for i in range(6)])

    assert client.files.delete(batch.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.input_file_id)

    assert until_over(client, batch).request_counts.completed == 6


def test_limits_are_named_with_their_values(start):
    router = start(max_file_bytes=1024, max_files_per_tenant=2)
    client, http = router.client(), router.http()

    with pytest.raises(openai.APIStatusError, match=r"1024 bytes, router\.batches\.max_file_bytes") as large:
        client.files.create(file=("x", b"x" * 1025), purpose="batch")
    with pytest.raises(openai.APIStatusError) as larger:
        client.files.create(file=("x", b"x" * 200_000), purpose="batch")
    for _ in range(2):
        client.files.create(file=("x", b"x" * 1024), purpose="batch")
    with pytest.raises(openai.RateLimitError, match="max_files_per_tenant is 2"):
        client.files.create(file=("x", b"x"), purpose="batch")

    assert (large.value.status_code, larger.value.status_code) == (413, 413)
    for sent in (
        {"files": FORM},
        {"files": FORM, "data": {"purpose": "assistants"}},
        {"files": FORM, "data": {"purpose": "batch", "expires_after[seconds]": "3600"}},
        {"data": {"purpose": "batch"}},
        {"content": b"--x\r\nbroken", "headers": {"content-type": "multipart/form-data; boundary=x"}},
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        {"json": {}},
    ):
        assert http.post("/v1/files", **sent).status_code == 400, sent
    for field in ({"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}, {"metadata": {"a": 1}}, {"x": 1}):
        body = {"input_file_id": "file-x", "endpoint": TEXT, "completion_window": "24h", **field}
        answer = http.post("/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(field)))


def test_without_a_directory_the_answer_says_what_to_set(start):
    client = start(directory=None).client()

    for call in (client.batches.list, client.files.list, lambda: client.batches.retrieve("batch_x")):
        with pytest.raises(openai.NotFoundError, match=r"router\.batches\.dir is not set"):
            call()


def test_a_draining_router_ends_its_lines_and_leaves_the_rest_to_the_next(start):
    first = start()
    first.service.script = lambda _: [0.1, *chunks_of(tokens_of("Hello"))]
    batch = submit(first.client(), [line(f"c{i}") for i in range(30)])
    first.service.wait_until_started()

    first.app.state.gate.is_draining = True
    wait_until(lambda: first.app.state.gate.num_in_flight == 0, limit_s=20)
    first.stack.close()
    num_first = len(first.service.requests)
    second = start()
    done = until_over(second.client(), batch)

    assert first.service.num_aborted == 0 and 0 < num_first < 30
    assert num_first + len(second.service.requests) == 30
    assert done.request_counts.completed == 30


def test_what_is_not_answered_within_the_window_has_expired(start, tmp_path):
    first = start()
    first.service.script = lambda _: [HANG]
    batch = submit(first.client(), [line("a"), line("b")])
    first.service.wait_until_started(2)
    first.stack.close()
    (state,) = tmp_path.rglob("batch.json")
    state.write_text(json.dumps({**json.loads(state.read_text()), "expires_s": 1}))

    client = start().client()
    done = until_over(client, batch)

    assert (done.status, done.output_file_id) == ("expired", None) and done.expired_at
    assert {one["error"]["code"] for one in results(client, done.error_file_id).values()} == {"batch_expired"}
