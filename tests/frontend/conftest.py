"""One real server per session over a scripted service that each test starts afresh."""

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

MAX_BODY_BYTES = 256 << 10
CONFIG = RouterConfig(max_body_bytes=MAX_BODY_BYTES, max_ongoing_requests=32)


@pytest.fixture(scope="session")
def _service_and_url() -> Iterator[tuple[ScriptedService, str]]:
    service = ScriptedService()
    app = create_app(service, load_codec(), CONFIG, max_model_len=CONTEXT_LIMIT, system_fingerprint="fp_tests")
    with serving(app) as url:
        yield service, url


@pytest.fixture
def service(_service_and_url) -> ScriptedService:
    """The service behind the server, without memory of other tests."""
    _service_and_url[0].reset()
    return _service_and_url[0]


@pytest.fixture
def base_url(_service_and_url, service) -> str:
    """Root URL of the server."""
    return _service_and_url[1]


@pytest.fixture(scope="session")
def _clients(_service_and_url) -> Iterator[tuple[openai.OpenAI, httpx.Client]]:
    """Made once: every client of its own would read the certificate store again."""
    url = _service_and_url[1]
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=20) as client,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield client, http


@pytest.fixture
def client(_clients, service) -> openai.OpenAI:
    """The public client, without retries of its own."""
    return _clients[0]


@pytest.fixture
def http(_clients, service) -> httpx.Client:
    """Plain HTTP, for bodies that no client would send."""
    return _clients[1]


@pytest.fixture
def max_body_bytes() -> int:
    """The server's body limit."""
    return MAX_BODY_BYTES


@pytest.fixture(scope="session")
def _claude(_service_and_url) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=_service_and_url[1], api_key="unused", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def claude(_claude, service) -> anthropic.Anthropic:
    """Anthropic's public client, without retries of its own."""
    return _claude
