"""`GET /openapi.json` says what the app does: its routes, its fields, their limits, and who may come in."""

import httpx
import jsonschema
import pytest

from dsv4_cluster.config.api_config import ApiConfig, ApiKey
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.frontend.auth import OPEN_PATHS, hash_key, new_key
from dsv4_cluster.frontend.batches import BATCHES
from dsv4_cluster.frontend.fields import CHAT, COMPLETION
from dsv4_cluster.frontend.message_fields import COUNT_TOKENS, MESSAGES
from dsv4_cluster.frontend.response_fields import INPUT_TOKENS, RESPONSES
from tests.kit.codec import load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

MODEL = "deepseek-v4-flash"
USER = [{"role": "user", "content": "hi"}]
CONTEXT = 1 << 20  # room for the largest max_tokens
TABLES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/anthropic/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": INPUT_TOKENS,
    "/v1/batches": BATCHES,
}
GOOD = {
    "/v1/chat/completions": {"model": MODEL, "messages": USER},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/messages": {"model": MODEL, "messages": USER},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": USER},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [3]},
}
NEEDED_WITH = {("/v1/chat/completions", "top_logprobs"): {"logprobs": True}}
FORCED = {"tool_choice", "response_format", "text", "output_config", "output_format"}  # need more than one field
WRONG = (True, -1.5, 10**30, "\x00 no such word", [[[]]], {"no such key": 1})


def build(**config):
    return create_app(ScriptedService(), load_codec(), RouterConfig(**config), max_model_len=CONTEXT)


def body_schema(document, path):
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def own_schema(schema):
    """Without the null of a field that may be absent."""
    return schema["anyOf"][0] if schema.get("anyOf", [{}])[-1] == {"type": "null"} else schema


@pytest.fixture(scope="module")
def lenient():
    """(document, client) of a server with room for everything."""
    app = build()
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http.get("/openapi.json").json(), http


def test_it_describes_the_routes_of_the_app_and_no_others(lenient):
    document, http = lenient
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    routes = {(route.path_format, method.lower()) for route in build().routes for method in route.methods}

    assert described == routes
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(set(names)) == len(names)
    assert http.get("/docs").status_code == http.get("/redoc").status_code == 404


@pytest.mark.parametrize("path", TABLES)
def test_the_fields_of_a_body_are_those_of_its_table(lenient, path):
    table, schema = TABLES[path], body_schema(lenient[0], path)

    assert set(schema["properties"]) == {*table.honoured, *table.labels, *table.refused}
    assert schema["additionalProperties"] is False


def test_every_body_is_a_json_schema(lenient):
    for methods in lenient[0]["paths"].values():
        for one in methods.values():
            for media in one.get("requestBody", {}).get("content", {}).values():
                jsonschema.Draft202012Validator.check_schema(media["schema"])


@pytest.mark.parametrize("path", GOOD)
def test_a_value_that_the_document_refuses_is_refused(lenient, path):
    document, http = lenient
    schema = body_schema(document, path)
    jsonschema.validate(GOOD[path], schema)
    properties = schema.get("properties") or {k: v for one in schema["anyOf"] for k, v in one["properties"].items()}
    accepted = []

    for name, field in properties.items():
        validator = jsonschema.Draft202012Validator(field)
        for value in WRONG:
            if validator.is_valid(value):
                continue
            if http.post(path, json={**GOOD[path], name: value}).status_code not in (400, 404):
                accepted.append((name, value))

    assert accepted == []


@pytest.mark.parametrize("path", GOOD)
def test_the_ends_of_every_range_are_accepted_and_what_lies_beyond_is_not(lenient, path):
    document, http = lenient
    wrong = []

    def ask(name, value):
        return http.post(path, json={**GOOD[path], **NEEDED_WITH.get((path, name), {}), name: value})

    for name, nullable in body_schema(document, path).get("properties", {}).items():
        schema = own_schema(nullable)
        if schema.get("type") not in ("integer", "number"):
            continue
        for end, step in (("minimum", -1), ("maximum", 1)):
            if end not in schema:
                continue
            beyond, inside = ask(name, schema[end] + step), ask(name, schema[end])
            if beyond.status_code != 400:
                wrong.append((name, schema[end] + step, beyond.text))
            of_length = ("tokens" in name and end == "maximum") or (name, schema[end]) == ("max_tokens", 0)
            if inside.status_code != 200 and not of_length:
                wrong.append((name, schema[end], inside.text))

    assert wrong == []


@pytest.mark.parametrize("path", GOOD)
def test_every_listed_word_is_accepted(lenient, path):
    document, http = lenient
    wrong = []

    for name, nullable in body_schema(document, path).get("properties", {}).items():
        for value in own_schema(nullable).get("enum", ()) if name not in FORCED else ():
            answer = http.post(path, json={**GOOD[path], name: value})
            if answer.status_code != 200:
                wrong.append((name, value, answer.text))

    assert wrong == []


def test_keys_are_described_where_they_are_asked_for():
    plain, locked = (
        build().openapi(),
        build(api=ApiConfig(keys=(ApiKey(name="a", sha256=hash_key(new_key())),))).openapi(),
    )

    assert "securitySchemes" not in plain["components"]
    assert locked["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, methods in locked["paths"].items():
        for method, one in methods.items():
            assert ("security" in one) == ("401" in one["responses"]) == (path not in OPEN_PATHS)
            assert "401" not in plain["paths"][path][method]["responses"]


def test_unknown_fields_are_allowed_where_they_are_ignored():
    document = build(api=ApiConfig(unknown_fields="ignore")).openapi()

    jsonschema.validate({**GOOD["/v1/chat/completions"], "new": 1}, body_schema(document, "/v1/chat/completions"))


def test_a_page_of_metrics_that_fails_is_an_error_as_described():
    async def broken():
        raise OSError("nobody home")

    app = create_app(ScriptedService(), load_codec(), RouterConfig(), max_model_len=CONTEXT, metrics_page=broken)
    with serving(app) as url:
        answer = httpx.get(f"{url}/metrics", timeout=20)

    assert answer.status_code == 500
    jsonschema.validate(answer.json(), app.openapi()["components"]["schemas"]["Error"])


def test_every_error_has_the_envelope_of_its_path(lenient):
    document, _ = lenient

    for path, methods in document["paths"].items():
        for one in methods.values():
            assert "422" not in one["responses"]
            for status, described in one["responses"].items():
                if status == "200" or (path, status) == ("/ready", "503"):
                    continue
                name = "MessagesError" if "/v1/messages" in path else "Error"
                assert described["content"]["application/json"]["schema"]["$ref"].endswith(f"/{name}")
