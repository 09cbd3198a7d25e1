"""Signs of life while an answer has nothing to say: events in a stream, white space in front of a whole answer."""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from dsv4_cluster.config.api_config import ApiConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, chunks_of, load_codec, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import HANG, ScriptedService

KEEP_ALIVE_S = 0.05
LATE_S = 3.5 * KEEP_ALIVE_S
MODEL = "deepseek-v4-flash"
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"model": MODEL, "messages": HI, "thinking": {"type": "disabled"}},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/messages": {"model": MODEL, "messages": HI, "max_tokens": 9, "thinking": {"type": "disabled"}},
    "/v1/responses": {"model": MODEL, "input": "hi", "reasoning": {"effort": "none"}},
}
SIGNS = dict.fromkeys(BODIES, ": keep-alive\n\n") | {"/v1/messages": 'event: ping\ndata: {"type":"ping"}\n\n'}


@pytest.fixture(scope="module")
def slow_server() -> Iterator[tuple[ScriptedService, str]]:
    """A server that shows signs of life often."""
    service = ScriptedService()
    config = RouterConfig(api=ApiConfig(keep_alive_s=KEEP_ALIVE_S))
    with serving(create_app(service, load_codec(), config, max_model_len=CONTEXT_LIMIT)) as url:
        yield service, url


@pytest.fixture
def late(slow_server) -> tuple[ScriptedService, str]:
    slow_server[0].reset()
    slow_server[0].script = lambda _: [LATE_S, *chunks_of(tokens_of("one two"))]
    return slow_server


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_has_nothing_to_say_sends_signs_of_life(late, path):
    late[0].script = lambda _: [
        LATE_S,
        chunks_of(tokens_of("one two"))[0],
        LATE_S,
        *chunks_of(tokens_of("one two"))[1:],
    ]

    response = httpx.post(late[1] + path, json=BODIES[path] | {"stream": True})

    sign = SIGNS[path]
    assert response.status_code == 200
    assert response.text.startswith(sign)
    assert 3 <= response.text.count(sign) <= 13
    assert " two" in response.text.rpartition(sign)[2]


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_that_takes_long_is_json_behind_line_ends(late, path):
    response = httpx.post(late[1] + path, json=BODIES[path])

    assert response.status_code == 200
    assert response.text.startswith("\n\n")
    assert response.headers["content-type"] == "application/json"
    assert "one two" in json.dumps(response.json())


def test_clients_read_both(late):
    with openai.OpenAI(base_url=f"{late[1]}/v1", api_key="unused", max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="none")
        stream = client.chat.completions.create(model=MODEL, messages=HI, reasoning_effort="none", stream=True)

        assert whole.choices[0].message.content == "one two"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one two"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_fails_late_ends_with_the_error(late, path, stream):
    late[0].script = lambda _: [LATE_S, WorkerLostError("worker 3 died")]

    response = httpx.post(late[1] + path, json=BODIES[path] | {"stream": stream})

    assert response.status_code == 200  # it went out with the first sign of life
    last = json.loads(response.text.strip().rpartition("data: ")[2] if stream else response.text)
    assert "worker 3 died" in last.get("response", last)["error"]["message"]
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_leaving_between_signs_of_life_aborts_the_generation(late, path, stream):
    service, base_url = late
    service.script = lambda _: [HANG]
    url, payload = urlsplit(base_url), json.dumps(BODIES[path] | {"stream": stream}).encode()

    with socket.create_connection((url.hostname, url.port), timeout=5) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload
        )
        seen = b""
        while seen.count(SIGNS[path].encode() if stream else b"\n\n") < 2:
            seen += connection.recv(4096) if stream else connection.recv(4096).replace(b"\r\n", b"\n")
    service.wait_until_over()

    assert (service.num_aborted, service.num_ended) == (1, 0)
