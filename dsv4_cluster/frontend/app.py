"""The FastAPI app: routes, and the one place where exceptions become HTTP answers."""

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from dsv4_cluster.clock import Clock, MonotonicClock
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.frontend import admin
from dsv4_cluster.frontend.auth import Keyring
from dsv4_cluster.frontend.background import BackgroundRuns
from dsv4_cluster.frontend.batch_desk import BatchDesk, open_desk
from dsv4_cluster.frontend.batches import cancel_batch, create_batch, list_batches, retrieve_batch
from dsv4_cluster.frontend.chat import chat_completions
from dsv4_cluster.frontend.completions import completions
from dsv4_cluster.frontend.direct_call import DirectCalls
from dsv4_cluster.frontend.edge import EdgeMiddleware, Gate
from dsv4_cluster.frontend.error_body import ANTHROPIC_BASE, CLIENT_GONE_STATUS, MESSAGES_PATH, error_response
from dsv4_cluster.frontend.files import delete_file, download_file, list_files, retrieve_file, upload_file
from dsv4_cluster.frontend.generation import Backend
from dsv4_cluster.frontend.messages import count_tokens, messages
from dsv4_cluster.frontend.observed import ObservedService
from dsv4_cluster.frontend.openapi import openapi_document
from dsv4_cluster.frontend.quota import QuotaObserver, Quotas
from dsv4_cluster.frontend.response_store import LocalResponseStore
from dsv4_cluster.frontend.responses import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from dsv4_cluster.frontend.tokens import detokenize, tokenize
from dsv4_cluster.metrics.batch_metrics import BatchMetrics
from dsv4_cluster.metrics.page import CONTENT_TYPE, MetricsPage, registry_text
from dsv4_cluster.metrics.router_metrics import RouterMetrics
from dsv4_cluster.protocol.services import GenerationService, ResponseStore
from dsv4_cluster.tokenizer.encoding import ModelCodec

ENCODE_THREADS = 2  # encoding releases the interpreter lock; more threads only let long prompts crowd out the loop

B = TypeVar("B")
Endpoint = Callable[[Request, B], Awaitable[Response]]


def create_app(
    service: GenerationService,
    codec: ModelCodec,
    config: RouterConfig,
    *,
    max_model_len: int,
    system_fingerprint: str | None = None,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    clock: Clock | None = None,
    registry: CollectorRegistry | None = None,
    metrics_page: MetricsPage | None = None,
    responses: ResponseStore | None = None,
) -> FastAPI:
    """Build the HTTP surface over a service. It starts nothing until requests come, and owns one thread pool.

    max_model_len: prompt + answer, in tokens. system_fingerprint: shown in answers.
    draw_seed: seeds in [0, 2**63) for requests that bring none.
    registry: takes this app's metrics. metrics_page: the text of /metrics; None = those of the registry.
    `app.state.gate` is the Gate: draining starts there. `app.state.batch_runner`: None without `router.batches.dir`.
    responses: shared by several routers; None = one of this process.
    """
    clock = clock or MonotonicClock()
    registry = registry or CollectorRegistry()
    metrics = RouterMetrics(registry, clock)
    quotas = Quotas(config.api, clock)
    keyring = Keyring(config.api)
    gate = Gate(keyring, quotas, max_in_flight=config.max_ongoing_requests)
    pool = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode")
    backend = Backend(
        service=ObservedService(service, (QuotaObserver(quotas), metrics)),
        codec=codec,
        config=config,
        max_model_len=max_model_len,
        encode_pool=pool,
        system_fingerprint=system_fingerprint,
        draw_seed=draw_seed,
        responses=responses or LocalResponseStore(config.responses, clock),
        background=BackgroundRuns(config.responses.max_background),
    )

    in_batches = {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/responses": create_response,
    }
    calls = DirectCalls(in_batches, backend, gate)
    desk = open_desk(config, calls, keyring, is_draining=lambda: gate.is_draining, metrics=BatchMetrics(registry))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        if desk is not None:
            desk.runner.start()
        yield
        if desk is not None:
            await desk.runner.close()
        await backend.background.close()
        pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="dsv4-cluster",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the address that a proxy hides
        lifespan=lifespan,
    )
    app.state.gate = gate
    app.state.batch_runner = desk and desk.runner
    if config.api.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.api.cors_allow_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(EdgeMiddleware, gate=gate, on_answer=metrics.count_answer)
    app.add_exception_handler(HTTPException, _http_error)
    document = openapi_document(config, codec.models.names, codec.text.vocab_size)
    app.openapi = lambda: document  # type: ignore[method-assign]
    _add_admin_routes(app, backend, gate, metrics_page or _own_page(registry))
    _add_response_routes(app, backend)
    _add_batch_routes(app, desk)
    _add_post(app, "/v1/chat/completions", chat_completions, backend)
    _add_post(app, "/v1/completions", completions, backend)
    for base in ("", ANTHROPIC_BASE):
        _add_post(app, f"{base}{MESSAGES_PATH}", messages, backend)
        _add_post(app, f"{base}{MESSAGES_PATH}/count_tokens", count_tokens, backend)
    _add_post(app, "/tokenize", tokenize, backend)
    _add_post(app, "/detokenize", detokenize, backend)
    return app


def _own_page(registry: CollectorRegistry) -> MetricsPage:
    async def page() -> str:
        return registry_text(registry)

    return page


def _add_post(app: FastAPI, path: str, endpoint: Endpoint[Backend], backend: Backend) -> None:
    _add_route(app, "POST", path, endpoint, backend)


def _add_route(app: FastAPI, method: str, path: str, endpoint: Endpoint[B], backend: B) -> None:
    async def run(request: Request) -> Response:
        return await _answer(request, endpoint(request, backend))

    app.add_api_route(path, run, methods=[method], response_model=None, name=endpoint.__name__)


def _add_response_routes(app: FastAPI, backend: Backend) -> None:
    one = "/v1/responses/{response_id}"
    for method, path, endpoint in (
        ("POST", "/v1/responses", create_response),
        ("POST", "/v1/responses/input_tokens", count_input_tokens),
        ("GET", one, retrieve_response),
        ("DELETE", one, delete_response),
        ("POST", f"{one}/cancel", cancel_response),
        ("GET", f"{one}/input_items", list_input_items),
    ):
        _add_route(app, method, path, endpoint, backend)


def _add_batch_routes(app: FastAPI, desk: BatchDesk | None) -> None:
    for method, path, endpoint in (
        ("POST", "/v1/files", upload_file),
        ("GET", "/v1/files", list_files),
        ("GET", "/v1/files/{file_id}", retrieve_file),
        ("DELETE", "/v1/files/{file_id}", delete_file),
        ("GET", "/v1/files/{file_id}/content", download_file),
        ("POST", "/v1/batches", create_batch),
        ("GET", "/v1/batches", list_batches),
        ("GET", "/v1/batches/{batch_id}", retrieve_batch),
        ("POST", "/v1/batches/{batch_id}/cancel", cancel_batch),
    ):
        if desk is None:
            _add_route(app, method, path, _batches_are_off, None)
        else:
            _add_route(app, method, path, endpoint, desk)


async def _batches_are_off(request: Request, _: None) -> Response:
    message = f"{request.url.path}: this server keeps no files and batches, router.batches.dir is not set"
    raise InvalidRequestError(message, http_status=404)


def _add_admin_routes(app: FastAPI, backend: Backend, gate: Gate, metrics_page: MetricsPage) -> None:
    created_s = int(time.time())

    async def one_model(request: Request) -> Response:
        async def find() -> Response:
            return admin.get_model(backend, request.path_params["name"], created_s)

        return await _answer(request, find())

    async def is_ready(request: Request) -> Response:
        return await _answer(request, admin.ready(backend, gate))

    async def all_models() -> Response:
        return admin.list_models(backend, created_s)

    async def health() -> Response:
        return admin.health()

    async def metrics(request: Request) -> Response:
        async def page() -> Response:
            return Response(await metrics_page(), headers={"content-type": CONTENT_TYPE})

        return await _answer(request, page())

    async def openapi() -> Response:
        return JSONResponse(app.openapi())

    for path, endpoint in (
        ("/openapi.json", openapi),
        ("/v1/models", all_models),
        ("/v1/models/{name:path}", one_model),
        ("/health", health),
        ("/ready", is_ready),
        ("/metrics", metrics),
    ):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)


async def _answer(request: Request, work: Awaitable[Response]) -> Response:
    """The boundary: whatever an endpoint raises becomes an answer in the envelope of its API."""
    try:
        return await work
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_STATUS)
    except Exception as err:
        return error_response(err, request.state.request_id, request.scope["path"])


async def _http_error(request: Request, err: Exception) -> Response:
    """Unknown paths and methods, which never reach an endpoint."""
    assert isinstance(err, HTTPException)
    message = f"{request.method} {request.url.path}: {err.detail}"
    wrapped = InvalidRequestError(message, http_status=err.status_code)
    return error_response(wrapped, request.state.request_id, request.scope["path"])
