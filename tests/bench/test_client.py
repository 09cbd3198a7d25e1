"""What the client measures and counts, against a server whose delays and failures are known."""

import asyncio
import dataclasses
import itertools

import aiohttp
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from dsv4_cluster.bench.client import RequestRecord, send
from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.errors import OverloadedError, WorkerLostError
from dsv4_cluster.protocol.output import FinishReason
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import HANG

TEXT = "one two three four five"
PROMPT = {"prompt": "Hi", "max_tokens": 50}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
SLACK_S = 2.0  # upper bounds only catch a wrong unit or a wrong event; this machine may be busy


def _ask(endpoint, body, **changes) -> RequestRecord:
    """One streamed request with usage."""
    endpoint = dataclasses.replace(endpoint, **changes)
    clock = MonotonicClock()
    record = RequestRecord(conversation=0, turn=0, due_s=clock.now_s(), sent_s=0.0)

    async def run() -> None:
        full = {"model": endpoint.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        async with aiohttp.ClientSession() as session:
            await send(session, endpoint, full, record, clock)

    asyncio.run(run())
    return record


def test_known_delays_give_the_latencies(endpoint, service):
    chunks = chunks_of(tokens_of(TEXT))
    service.script = lambda _: [0.3, chunks[0], 0.1, *itertools.chain(*((c, 0.1) for c in chunks[1:]))]

    record = _ask(endpoint, PROMPT)

    assert record.is_ok, record.error_message
    assert 0.3 <= record.ttft_s < 0.3 + SLACK_S
    assert len(record.itl_s) == len(chunks) - 2  # the last chunk is the stop token and has no text
    assert 0.1 * len(record.itl_s) * 0.9 <= sum(record.itl_s) < 0.1 * len(record.itl_s) + SLACK_S
    assert record.tpot_s == pytest.approx(sum(record.itl_s) / (record.num_output_tokens - 1))
    assert record.e2e_s >= 0.3 + 0.1 * (len(chunks) - 1)


@pytest.mark.parametrize(("api", "body"), [("completions", PROMPT), ("chat", MESSAGES)])
def test_counts_and_text_are_exact(endpoint, service, api, body):
    service.script = lambda _: chunks_of(tokens_of(TEXT), num_cached_tokens=2)

    record = _ask(endpoint, body, api=api)

    assert record.text.strip() == TEXT
    assert record.num_output_tokens == len(tokens_of(TEXT))
    assert record.num_prompt_tokens == len(service.requests[0].prompt_token_ids)
    assert record.num_cached_tokens == 2
    assert record.finish_reason == "stop"


def test_tokens_that_come_together_are_one_event(endpoint, service):
    ids = tokens_of(TEXT)
    service.script = lambda _: chunks_of(ids, cuts=[2, 4])

    record = _ask(endpoint, PROMPT)

    assert len(record.event_s) == 3
    assert record.num_output_tokens == len(ids)


def test_thoughts_count_as_text(endpoint, service):
    service.script = lambda _: chunks_of(tokens_of("I think</think>so"))

    record = _ask(endpoint, {**MESSAGES, "thinking": {"type": "enabled"}}, api="chat")

    assert "I think" in record.text and record.text.endswith("so")


def test_an_http_error_is_counted_by_its_status(endpoint, service):
    service.script = lambda _: [OverloadedError("no room")]

    record = _ask(endpoint, PROMPT)

    assert (record.error_kind, record.error_message) == ("http 429", "no room")
    assert record.ttft_s is None


def test_a_refused_body_is_an_http_error(endpoint, service):
    record = _ask(endpoint, {**PROMPT, "max_tokens": 10**6})

    assert record.error_kind == "http 400"
    assert "context length" in record.error_message


def test_an_error_within_the_stream_is_told_apart(endpoint, service):
    service.script = lambda _: [chunks_of(tokens_of("Hi there"))[0], WorkerLostError("gone")]

    record = _ask(endpoint, PROMPT)

    assert (record.error_kind, record.error_message) == ("in stream", "gone")
    assert len(record.event_s) == 1


def test_a_hanging_answer_times_out(endpoint, service):
    service.script = lambda _: [chunks_of(tokens_of("Hi there"))[0], HANG]

    record = _ask(endpoint, PROMPT, timeout_s=0.5)

    assert record.error_kind == "timeout"
    assert 0.5 <= record.e2e_s < 0.5 + SLACK_S
    service.wait_until_over()
    assert service.num_aborted == 1


def test_nobody_listening_is_a_connect_error(endpoint):
    record = _ask(endpoint, PROMPT, base_url="http://127.0.0.1:9")

    assert record.error_kind == "connect"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', "truncated"),
        (b"data: {not json}\n\ndata: [DONE]\n\n", "not understood"),
        (b'data: {"choices": 3}\n\ndata: [DONE]\n\n', "not understood"),
    ],
)
def test_a_server_that_breaks_the_protocol_is_an_error(endpoint, body, kind):
    app = FastAPI()

    @app.post("/v1/completions")
    async def answer() -> StreamingResponse:
        return StreamingResponse(iter([body]), media_type="text/event-stream")

    with serving(app) as url:
        record = _ask(endpoint, PROMPT, base_url=url)

    assert record.error_kind == kind


def test_an_answer_that_ends_at_its_limit_is_no_error(endpoint, service):
    service.script = lambda _: chunks_of(tokens_of(TEXT), finish=FinishReason.LENGTH)

    record = _ask(endpoint, PROMPT)

    assert record.is_ok
    assert record.finish_reason == "length"
