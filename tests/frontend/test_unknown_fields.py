"""`router.api.unknown_fields`: what nobody here knows is refused by name, or dropped; what is known stays as strict."""

from collections.abc import Iterator

import httpx
import pytest

from dsv4_cluster.config.api_config import ApiConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, NAMES, load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
UNKNOWN = [
    (CHAT, {"messages": [HI], "mood": 1}, "mood"),
    (CHAT, {"messages": [{**HI, "mood": 1}]}, "messages[0].mood"),
    (
        CHAT,
        {"messages": [{**HI, "content": [{"type": "text", "text": "a", "mood": 1}]}]},
        "messages[0].content[0].mood",
    ),
    (CHAT, {"messages": [HI], "tools": [{**TOOL, "mood": 1}]}, "tools[0].mood"),
    (CHAT, {"messages": [HI], "thinking": {"type": "enabled", "mood": 1}}, "thinking.mood"),
    (CHAT, {"messages": [HI], "stream": True, "stream_options": {"mood": 1}}, "stream_options.mood"),
    (TEXT, {"prompt": "hi", "mood": 1}, "mood"),
    (TEXT, {"prompt": "hi", "response_format": {"type": "text", "mood": 1}}, "response_format.mood"),
]
KNOWN = [
    (CHAT, {"messages": [HI], "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": [{**HI, "audio": {"id": "1"}}]}, "messages[0].audio"),
    (CHAT, {"messages": [{**HI, "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    (TEXT, {"prompt": "hi", "best_of": 2}, "best_of"),
]


@pytest.fixture(scope="module")
def lenient() -> Iterator[str]:
    """URL of a server that drops what it does not know."""
    config = RouterConfig(api=ApiConfig(unknown_fields="ignore"))
    with serving(create_app(ScriptedService(), load_codec(), config, max_model_len=CONTEXT_LIMIT)) as url:
        yield url


@pytest.mark.parametrize(("path", "fields", "param"), UNKNOWN, ids=[f"{path} {param}" for path, _, param in UNKNOWN])
def test_an_unknown_field_is_refused_by_name_or_dropped(http, lenient, path, fields, param):
    body = {"model": NAMES[0], **fields}

    refused = http.post(path, json=body)
    dropped = httpx.post(lenient + path, json=body)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert dropped.status_code == 200, dropped.text


@pytest.mark.parametrize(("path", "fields", "param"), KNOWN, ids=[f"{path} {param}" for path, _, param in KNOWN])
def test_what_is_known_and_not_supported_is_refused_either_way(http, lenient, path, fields, param):
    body = {"model": NAMES[0], **fields}

    answers = [http.post(path, json=body), httpx.post(lenient + path, json=body)]

    assert [(a.status_code, a.json()["error"]["param"]) for a in answers] == [(400, param)] * 2
