"""What a client is told when something is wrong: the right status, OpenAI's envelope, and a server that goes on."""

import json
import socket
from urllib.parse import urlsplit

import openai
import pytest

from dsv4_cluster.errors import (
    DeadlineExceededError,
    KVTransferError,
    NonFiniteLogitsError,
    OverloadedError,
    WorkerLostError,
)
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, tokens_of

MODEL = "deepseek-v4-flash"
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(**fields):
    return {"model": MODEL, "messages": HI, "thinking": {"type": "disabled"}, **fields}


def completion(**fields):
    return {"model": MODEL, "prompt": "hi", **fields}


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": 1e999}',
        b"[" * 50_000,
        b'{"a":' * 50_000,
    ],
    ids=["empty", "cut", "list", "string", "not-utf8", "nan", "inf", "deep-list", "deep-object"],
)
def test_a_body_that_is_no_json_object_is_400(http, path, body):
    error = error_of(http.post(path, content=body), 400)

    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path, body", [(CHAT, chat(model="gpt-4")), (TEXT, completion(model="gpt-4"))])
def test_an_unknown_model_is_404_and_names_the_served_ones(http, path, body):
    error = error_of(http.post(path, json=body), 404)

    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": None},
        {"messages": "hi"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"model": 5},
        {"temperature": "warm"},
        {"temperature": 2.5},
        {"top_p": 0},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 2**70},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"stream": "yes"},
        {"tools": "none"},
        {"thinking": 5},
        {"stream_options": {"include_usage": True}},
    ],
    ids=lambda fields: str(fields)[:50],
)
def test_a_wrong_chat_field_is_400(http, service, fields):
    body = json.dumps(chat(**fields))

    error = error_of(http.post(CHAT, content=body.encode()), 400)

    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert service.requests == []


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "regex", "regex": "a", "flags": "i"}}, "response_format.flags"),
        ({"store": 1}, "store"),
        ({"metadata": "a"}, "metadata"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"priority": -1}, "priority"),
        ({"priority": 101}, "priority"),
        ({"user_id": 5}, "user_id"),
        ({"user_id": "x" * 513}, "user_id"),
        ({"reasoning_effort": "ultra"}, "reasoning_effort"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"messages": [{**HI[0], "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{**HI[0], "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "content[0].x"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]}, "tools[0].x"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"user": 5}, "user"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(http, service, fields, param):
    error = error_of(http.post(CHAT, json=chat(**fields)), 400)

    assert error["param"].endswith(param)
    assert param.split(".")[-1] in error["message"]
    assert service.requests == []


def test_values_that_ask_for_nothing_are_accepted(http):
    neutral = {
        "n": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "store": True,
        "user": "someone",
        "user_id": "someone",
        "safety_identifier": "someone",
        "prompt_cache_key": "x",
        "service_tier": "auto",
        "priority": 0,
        "metadata": {"a": "b"},
        "stop": None,
        "top_k": None,
    }

    assert http.post(CHAT, json=chat(**neutral)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_over_long_prompt_is_400_with_the_numbers(http, path):
    text = "word " * CONTEXT_LIMIT
    body = chat(messages=[{"role": "user", "content": text}]) if path == CHAT else completion(prompt=text)

    error = error_of(http.post(path, json=body), 400)

    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT_LIMIT) in error["message"]
    assert str(len(tokens_of(text)))[:2] in error["message"]


@pytest.mark.parametrize(
    "path, body", [(CHAT, chat(max_tokens=CONTEXT_LIMIT)), (TEXT, completion(max_tokens=CONTEXT_LIMIT))]
)
def test_an_answer_that_does_not_fit_is_400_with_the_numbers(http, path, body):
    error = error_of(http.post(path, json=body), 400)

    assert error["code"] == "context_length_exceeded"
    assert f"{CONTEXT_LIMIT} for the answer" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "k" * 100_000, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "k" * 100_000: 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "k" * 100_000: 1}),
        ("/v1/responses", {"input": "x", "k" * 100_000: 1}),
        ("/tokenize", {"model": "k" * 100_000, "prompt": "x"}),
    ],
    ids=["role", "field of chat", "field of messages", "field of responses", "model"],
)
def test_what_a_client_wrote_comes_back_shortened(http, path, body):
    response = http.post(path, json={"model": MODEL} | body)

    assert response.status_code in (400, 404) and len(response.content) < 4000
    assert "kkk[...]" in response.json()["error"]["message"]


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_over_the_limit_is_413(http, max_body_bytes, is_declared):
    piece = b" " * (max_body_bytes // 4)
    content = piece * 5 if is_declared else iter([piece] * 5)

    error = error_of(http.post(CHAT, content=content), 413)

    assert str(max_body_bytes) in error["message"]


def test_a_body_that_never_arrives_is_408(base_url, http, monkeypatch):
    monkeypatch.setattr("dsv4_cluster.frontend.body.BODY_TIMEOUT_S", 0.05)
    url = urlsplit(base_url)

    with socket.create_connection((url.hostname, url.port), timeout=5) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{{".encode())
        answer = connection.recv(4096)

    assert answer.startswith(b"HTTP/1.1 408")
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v2/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("POST", f"{CHAT}/", 404),
        ("GET", "/v1/files/", 404),
        ("GET", "/v1/responses//", 404),
    ],
)
def test_unknown_paths_and_methods_use_the_envelope(http, method, path, status):
    error = error_of(http.request(method, path), status)

    assert path in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "err, status, code",
    [
        (OverloadedError("full"), 429, "rate_limit_exceeded"),
        (OverloadedError("no thread", http_status=503), 503, "overloaded"),
        (WorkerLostError("worker 3 died"), 503, "worker_lost"),
        (DeadlineExceededError("600 s are over"), 504, "deadline_exceeded"),
        (NonFiniteLogitsError("NaN at layer 2"), 500, "non_finite_logits"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
def test_an_error_before_the_first_token_is_an_http_status(http, service, stream, err, status, code):
    service.script = lambda _: [err]

    response = http.post(CHAT, json=chat(stream=stream))

    error = error_of(response, status)
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("path, body", [(CHAT, chat(stream=True)), (TEXT, completion(stream=True))])
def test_an_error_mid_stream_is_one_error_event_and_no_done(http, service, path, body):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], KVTransferError("lost")]

    response = http.post(path, json=body)

    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200
    assert json.loads(events[-1])["error"]["code"] == "kv_transfer_failed"
    assert "[DONE]" not in response.text
    assert "one two" in "".join(json.loads(e)["choices"][0].get("text", "") for e in events[:-1]) or path == CHAT


def test_the_public_client_sees_an_error_mid_stream_as_an_exception(client, service):
    failed = TokenChunk(request_id="r", finish_reason=FinishReason.ERROR, error=WorkerLostError("decode died"))
    service.script = lambda _: [*chunks_of(tokens_of("one two"))[:1], failed]

    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="decode died"):
        list(stream)


def test_a_stream_without_an_end_is_an_error(http, service):
    service.script = lambda _: chunks_of(tokens_of("one two"))[:1]

    assert error_of(http.post(CHAT, json=chat()), 500)["code"] == "internal_error"


def test_the_server_keeps_serving_after_errors(http, client, service):
    for body in (b"{", b"[]", json.dumps(chat(model="none")).encode(), json.dumps(chat(messages=[])).encode()):
        assert http.post(CHAT, content=body).status_code in (400, 404)

    answer = client.chat.completions.create(model=MODEL, messages=HI, extra_body={"thinking": {"type": "disabled"}})

    assert answer.choices[0].message.content == "Hello"


def test_typed_errors_of_the_public_client(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=HI)

    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "number"),
    [
        (CHAT, chat(n=33), 33),
        (TEXT, completion(n=33), 33),
        (TEXT, completion(prompt=["a"] * 12, n=3), 36),
        (TEXT, completion(prompt=["a"] * 40), 40),
    ],
)
def test_more_answers_than_the_router_ever_takes_are_refused_for_good(http, service, path, body, number):
    """A 429 would make clients try again for ever. The server of these tests takes 32 at a time."""
    error = error_of(http.post(path, json=body), 400)

    assert error["param"] == "n" and f"{number} answers" in error["message"] and "is 32" in error["message"]
    assert service.requests == []
