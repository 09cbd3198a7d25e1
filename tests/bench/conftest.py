"""A real HTTP server over a scripted service, as for the front-end tests, with room for many requests."""

from collections.abc import Iterator

import pytest

from dsv4_cluster.bench.client import Endpoint
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, NAMES, load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

MAX_IN_FLIGHT = 24


@pytest.fixture(scope="session")
def _bench_server() -> Iterator[tuple[ScriptedService, str]]:
    service = ScriptedService()
    config = RouterConfig(max_ongoing_requests=MAX_IN_FLIGHT)
    with serving(create_app(service, load_codec(), config, max_model_len=CONTEXT_LIMIT)) as url:
        yield service, url


@pytest.fixture
def service(_bench_server) -> ScriptedService:
    """The service behind the server, without memory of other tests."""
    _bench_server[0].reset()
    return _bench_server[0]


@pytest.fixture
def base_url(_bench_server, service) -> str:
    """Root URL of the server."""
    return _bench_server[1]


@pytest.fixture
def endpoint(base_url) -> Endpoint:
    """Raw completions at the server."""
    return Endpoint(base_url=base_url, api="completions", model=NAMES[0], timeout_s=10.0)


@pytest.fixture
def max_in_flight() -> int:
    """Requests that the server takes at a time."""
    return MAX_IN_FLIGHT
