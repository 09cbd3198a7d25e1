"""A client that leaves ends its generation at once, exactly once, and nobody else's."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import openai
import pytest

from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, load_codec, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import HANG, ScriptedService

MODEL = "deepseek-v4-flash"
HI = [{"role": "user", "content": "hi"}]
LIMIT_S = 1.0
CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: {"model": MODEL, "messages": HI, "thinking": {"type": "disabled"}},
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"]},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 9, "thinking": {"type": "disabled"}},
    "/v1/responses": {"model": MODEL, "input": "hi", "reasoning": {"effort": "none"}},
}


@contextmanager
def posted(base_url: str, path: str, body: dict) -> Iterator[socket.socket]:
    """Send a request on a connection of its own; the client leaves at the end of the block."""
    url = urlsplit(base_url)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=5) as connection:
        connection.sendall(head.encode() + payload)
        yield connection


def read_until(connection: socket.socket, mark: bytes) -> None:
    """Read the answer up to a piece of text."""
    seen = b""
    while mark not in seen:
        piece = connection.recv(4096)
        assert piece, f"the server closed the connection after {seen!r}"
        seen += piece


@pytest.mark.parametrize("path", BODIES)
def test_leaving_mid_stream_aborts_within_a_second(base_url, service, path):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], HANG]
    num_prompts = len(BODIES[path].get("prompt", "x"))

    with posted(base_url, path, BODIES[path] | {"stream": True}) as connection:
        read_until(connection, b" two")
        service.wait_until_started(num_prompts)
    start = time.monotonic()
    service.wait_until_over(num_prompts)

    assert time.monotonic() - start < LIMIT_S
    assert (service.num_aborted, service.num_ended) == (num_prompts, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_leaving_before_the_first_token_aborts_within_a_second(base_url, service, path, stream):
    service.script = lambda _: [HANG]
    num_prompts = len(BODIES[path].get("prompt", "x"))
    with posted(base_url, path, BODIES[path] | {"stream": stream}):
        service.wait_until_started(num_prompts)
    start = time.monotonic()
    service.wait_until_over(num_prompts)

    assert time.monotonic() - start < LIMIT_S
    assert (service.num_aborted, service.num_ended) == (num_prompts, 0)


def test_leaving_does_not_disturb_the_others(base_url, client, service):
    service.script = lambda request: (
        [*chunks_of(tokens_of("never ends"))[:1], HANG] if request.sampling.seed == 1 else chunks_of(tokens_of("fine"))
    )

    with posted(base_url, CHAT, BODIES[CHAT] | {"stream": True, "seed": 1}) as connection:
        read_until(connection, b"never")
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, seed=2, extra_body={"thinking": {"type": "disabled"}}
    )
    service.wait_until_over(2)

    assert answer.choices[0].message.content == "fine"
    assert (service.num_aborted, service.num_ended) == (1, 1)


def test_cancelling_the_async_client_aborts(base_url, service):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], HANG]

    async def read_and_cancel() -> list[str]:
        texts: list[str] = []
        got_text = asyncio.Event()
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:

            async def read() -> None:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=HI, stream=True, extra_body={"thinking": {"type": "disabled"}}
                )
                async for chunk in stream:
                    texts.append(chunk.choices[0].delta.content or "")
                    if texts[-1]:
                        got_text.set()

            task = asyncio.create_task(read())
            await asyncio.wait_for(got_text.wait(), 5)
            task.cancel()
            await asyncio.wait([task], timeout=5)
        return texts

    texts = asyncio.run(read_and_cancel())
    service.wait_until_over()

    assert "".join(texts).startswith("one")
    assert (service.num_aborted, service.num_ended) == (1, 0)


def test_requests_over_the_bound_get_429_and_a_place_comes_free():
    service = ScriptedService()
    service.script = lambda request: [HANG] if request.sampling.seed == 1 else chunks_of(tokens_of("fine"))
    app = create_app(service, load_codec(), RouterConfig(max_ongoing_requests=1), max_model_len=CONTEXT_LIMIT)

    with serving(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=10) as client:
        with posted(url, CHAT, BODIES[CHAT] | {"seed": 1}):
            service.wait_until_started()
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model=MODEL, messages=HI, seed=2)
        service.wait_until_over()
        deadline = time.monotonic() + 5
        while True:
            try:
                answer = client.chat.completions.create(
                    model=MODEL, messages=HI, seed=2, extra_body={"thinking": {"type": "disabled"}}
                )
                break
            except openai.RateLimitError:
                assert time.monotonic() < deadline

    assert caught.value.response.headers["retry-after"] == "1"
    assert answer.choices[0].message.content == "fine"
