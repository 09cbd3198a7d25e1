"""Keys, tenants and limits on the paths of Messages and Responses."""

import contextlib

import anthropic
import httpx
import openai
import pytest

from dsv4_cluster.config.api_config import ApiConfig, ApiKey, UsageLimits
from dsv4_cluster.config.responses_config import ResponsesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.frontend.auth import hash_key, new_key
from tests.kit.clock import wait_until
from tests.kit.codec import CONTEXT_LIMIT, load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import HANG, ScriptedService, says

MODEL = "deepseek-v4-flash"
HI = [{"role": "user", "content": "hi"}]
ALICE, BOB = new_key(), new_key()
ONE_AT_A_TIME = UsageLimits(max_concurrent_requests=1)
KEYS = (
    ApiKey(name="alice", sha256=hash_key(ALICE), limits=ONE_AT_A_TIME),
    ApiKey(name="bob", sha256=hash_key(BOB)),
)


@pytest.fixture
def start():
    """start(responses=..., keys=..., ...) -> (service, base URL, app); everything ends with the test."""
    with contextlib.ExitStack() as stack:

        def begin(responses=None, **api):
            service = ScriptedService()
            config = RouterConfig(api=ApiConfig(**api), responses=responses or ResponsesConfig())
            app = create_app(service, load_codec(), config, max_model_len=CONTEXT_LIMIT)
            return service, stack.enter_context(serving(app)), app

        yield begin


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)


def ask(client, **fields):
    return client.responses.create(**{"model": MODEL, "input": "hi", "reasoning": {"effort": "none"}, **fields})


def test_messages_take_the_key_of_anthropics_clients(start):
    service, url, _ = start(keys=KEYS)

    with anthropic.Anthropic(base_url=url, api_key=BOB, max_retries=0) as client:
        client.messages.create(model=MODEL, messages=HI, max_tokens=9, metadata={"user_id": "u"})
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.count_tokens(model=MODEL, messages=HI)

    assert caught.value.body["error"]["type"] == "authentication_error"
    assert [(request.tenant, request.cache_salt) for request in service.requests] == [("bob/u", "u")]


def test_a_response_of_another_tenant_is_not_found(start):
    _, url, _ = start(keys=KEYS)

    with client_of(url, ALICE) as alice, client_of(url, BOB) as bob:
        own = ask(alice)
        assert alice.responses.retrieve(own.id).id == own.id
        for call in (
            bob.responses.retrieve,
            bob.responses.delete,
            bob.responses.cancel,
            bob.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                call(own.id)
        with pytest.raises(openai.NotFoundError):
            ask(bob, previous_response_id=own.id)
        assert alice.responses.retrieve(own.id).id == own.id


def test_a_background_response_holds_its_place_until_it_ends(start):
    service, url, app = start(keys=KEYS)
    service.script = lambda _: [HANG]

    with client_of(url, ALICE) as alice, client_of(url, BOB) as bob:
        running = ask(alice, background=True)
        with pytest.raises(openai.RateLimitError):
            ask(alice)
        assert app.state.gate.num_in_flight == 1
        service.wait_until_started()
        service.script = says("Hello")
        assert ask(bob).status == "completed"
        assert alice.responses.cancel(running.id).status == "cancelled"
        wait_until(lambda: app.state.gate.num_in_flight == 0)
        assert ask(alice).status == "completed"


def test_background_responses_are_bounded(start):
    service, url, _ = start(responses=ResponsesConfig(max_background=1))
    service.script = lambda _: [HANG]

    with client_of(url, "unused") as client:
        running = ask(client, background=True)
        with pytest.raises(openai.RateLimitError):
            ask(client, background=True)
        client.responses.cancel(running.id)
        service.wait_until_over()


def test_a_stopping_server_ends_its_background_responses():
    service = ScriptedService()
    service.script = lambda _: [HANG]
    app = create_app(service, load_codec(), RouterConfig(), max_model_len=CONTEXT_LIMIT)

    with serving(app) as url, client_of(url, "unused") as client:
        ask(client, background=True)
        service.wait_until_started()

    assert (service.num_aborted, service.num_ended) == (1, 0)


def test_what_is_switched_off_is_a_400(start):
    _, url, _ = start(responses=ResponsesConfig(max_entries=0, max_background=0))

    with client_of(url, "unused") as client:
        assert ask(client).store is False
        for fields, param in (({"store": True}, "store"), ({"background": True}, "background")):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, **fields)
            assert caught.value.param == param


@pytest.mark.parametrize(
    ("path", "body", "unsupported"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi", "weight": 1}]}, {"container": "c"}),
        ("/v1/responses", {"input": "hi", "text": {"colour": "red"}}, {"truncation": "auto"}),
    ],
)
def test_unknown_keys_are_dropped_where_the_configuration_says_so(start, path, body, unsupported):
    _, strict, _ = start()
    _, lenient, _ = start(unknown_fields="ignore")
    body = {"model": MODEL, "frobnicate": 1, **body}

    assert httpx.post(strict + path, json=body).status_code == 400
    assert httpx.post(lenient + path, json=body).status_code == 200
    assert httpx.post(lenient + path, json=body | unsupported).status_code == 400
