"""The OpenAPI document of an app: `GET /openapi.json`. Source: OpenAPI 3.1."""

import re
from collections.abc import Iterable
from typing import Any

from dsv4_cluster import __version__
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.answer_schemas import ANTHROPIC_ERROR, OPENAI_ERROR
from dsv4_cluster.frontend.auth import OPEN_PATHS
from dsv4_cluster.frontend.error_body import is_messages_path
from dsv4_cluster.frontend.operations import JSON, Operation, operations
from dsv4_cluster.frontend.schemas import STRING, opened

_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_STATUSES = {
    400: "the request breaks a rule; the message names the field",
    401: "no API key, or one that is not known",
    404: "there is no such model, object or path here",
    408: "the body did not arrive in time",
    409: "it is over",
    413: "the body is too large",
    429: "a limit is reached; retry-after says when to try again",
    500: "an internal error",
    503: "not to be answered at the moment; retry-after says when to try again",
    504: "not finished in time",
}
_REQUEST_ID = {"description": "names the request in the log", "schema": STRING}
_RETRY_AFTER = {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}


def openapi_document(config: RouterConfig, names: tuple[str, ...], vocab_size: int) -> dict[str, Any]:
    """Built once per app. names: of the served models."""
    has_keys = bool(config.api.keys)
    paths: dict[str, Any] = {}
    for operation in operations(names, vocab_size):
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, has_keys=has_keys)
    components: dict[str, Any] = {"schemas": {"Error": OPENAI_ERROR, "MessagesError": ANTHROPIC_ERROR}}
    if has_keys:
        components["securitySchemes"] = _SECURITY
    document = {
        "openapi": "3.1.0",
        "info": {"title": "dsv4-cluster", "version": __version__},
        "paths": paths,
        "components": components,
    }
    ignores = config.api.unknown_fields == "ignore"
    return opened(document) if ignores else document


def _described(operation: Operation, *, has_keys: bool) -> dict[str, Any]:
    needs_key = has_keys and operation.path not in OPEN_PATHS
    statuses = sorted({*operation.errors, 500, *((401,) if needs_key else ())})
    answers: dict[str, Any] = {"200": _answer("as asked", operation.content)}
    for status in statuses:
        answers[str(status)] = _error(operation, status)
    if operation.unready is not None:
        answers["503"] = _answer("not ready, with the reasons", {JSON: operation.unready})
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query.items())],
        "responses": answers,
    }
    if operation.body:
        content = {kind: {"schema": schema} for kind, schema in operation.body.items()}
        described["requestBody"] = {"required": True, "content": content}
    if needs_key:
        described["security"] = [{name: []} for name in _SECURITY]
    return described


def _answer(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": description,
        "headers": {"x-request-id": _REQUEST_ID},
        "content": {kind: {"schema": schema} for kind, schema in content.items()},
    }


def _error(operation: Operation, status: int) -> dict[str, Any]:
    name = "MessagesError" if is_messages_path(operation.path) else "Error"
    described = _answer(_STATUSES[status], {JSON: {"$ref": f"#/components/schemas/{name}"}})
    if status in (429, 503):
        described["headers"]["retry-after"] = _RETRY_AFTER
    return described


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(query: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query]
