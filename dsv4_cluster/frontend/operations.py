"""What every route takes and answers: the rows of the OpenAPI document."""

from dataclasses import dataclass, field

from dsv4_cluster.frontend import answer_schemas as answers
from dsv4_cluster.frontend import body_schemas as bodies
from dsv4_cluster.frontend import family_schemas as families
from dsv4_cluster.frontend.batches import DEFAULT_PAGE as BATCHES_PAGE
from dsv4_cluster.frontend.batches import MAX_PAGE as MAX_BATCHES_PAGE
from dsv4_cluster.frontend.error_body import ANTHROPIC_BASE, MESSAGES_PATH
from dsv4_cluster.frontend.files import MAX_PAGE as MAX_FILES_PAGE
from dsv4_cluster.frontend.responses import DEFAULT_PAGE as ITEMS_PAGE
from dsv4_cluster.frontend.responses import MAX_PAGE as MAX_ITEMS_PAGE
from dsv4_cluster.frontend.schemas import BOOLEAN, STRING, Schema, integer, one_of
from dsv4_cluster.metrics.page import CONTENT_TYPE as METRICS_TYPE

JSON, EVENTS, FORM, BYTES = "application/json", "text/event-stream", "multipart/form-data", "application/octet-stream"
_BODY = (400, 408, 413, 429, 503)  # what a POST with a body is refused with, whatever it says
_GENERATION = (*_BODY, 404, 504)
_STORED = (404, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    content: media type -> schema of the answer with status 200. errors: statuses beside 401 and 500.
    body: media type -> schema. query: parameter -> schema.
    """

    method: str
    path: str
    name: str
    summary: str
    content: dict[str, Schema]
    errors: tuple[int, ...] = ()
    body: dict[str, Schema] = field(default_factory=dict)
    query: dict[str, Schema] = field(default_factory=dict)
    unready: Schema | None = None  # the body of a 503 that is no error


def operations(names: tuple[str, ...], vocab_size: int) -> tuple[Operation, ...]:
    """Every route of the app. names: the models served here."""
    model = one_of(*names)
    return (
        *_generating(model, vocab_size),
        *_text(model, vocab_size),
        *_stored_responses(),
        *_files(),
        *_batches(),
        *_probes(),
    )


def _post(path: str, name: str, summary: str, body: Schema, content: dict[str, Schema], *errors: int) -> Operation:
    return Operation(
        method="post", path=path, name=name, summary=summary, body={JSON: body}, content=content, errors=errors
    )


def _get(path: str, name: str, summary: str, content: Schema, *errors: int, **query: Schema) -> Operation:
    return Operation(
        method="get", path=path, name=name, summary=summary, content={JSON: content}, errors=errors, query=query
    )


def _generating(model: Schema, vocab_size: int) -> tuple[Operation, ...]:
    chat, completion = bodies.chat_body(model, vocab_size), bodies.completion_body(model, vocab_size)
    messages, counted = families.messages_body(model, vocab_size), families.count_tokens_body(model)
    response, input_tokens = families.responses_body(model, vocab_size), families.input_tokens_body(model)
    rows = [
        ("/v1/chat/completions", "chat_completions", "Answer a chat", chat, answers.CHAT_COMPLETION),
        ("/v1/completions", "completions", "Continue a text, or fill a gap", completion, answers.COMPLETION),
        ("/v1/responses", "create_response", "Answer with items", response, answers.RESPONSE),
    ]
    for base, prefix in (("", ""), (ANTHROPIC_BASE, "anthropic_")):
        rows.append((f"{base}{MESSAGES_PATH}", f"{prefix}messages", "Answer messages", messages, answers.MESSAGE))
    counts = [
        (f"{base}{MESSAGES_PATH}/count_tokens", f"{prefix}count_tokens", counted, answers.COUNT_TOKENS)
        for base, prefix in (("", ""), (ANTHROPIC_BASE, "anthropic_"))
    ]
    counts.append(("/v1/responses/input_tokens", "count_input_tokens", input_tokens, answers.INPUT_TOKENS))
    return (
        *(
            _post(path, name, summary, body, {JSON: whole, EVENTS: answers.EVENT}, *_GENERATION)
            for path, name, summary, body, whole in rows
        ),
        *(
            _post(path, name, "The length of a prompt in tokens", body, {JSON: whole}, *_GENERATION)
            for path, name, body, whole in counts
        ),
    )


def _text(model: Schema, vocab_size: int) -> tuple[Operation, ...]:
    return (
        _post(
            "/tokenize",
            "tokenize",
            "Text to token ids",
            bodies.tokenize_body(model),
            {JSON: answers.TOKENS},
            *_GENERATION,
        ),
        _post(
            "/detokenize",
            "detokenize",
            "Token ids to text",
            bodies.detokenize_body(model, vocab_size),
            {JSON: answers.TEXT},
            *_GENERATION,
        ),
    )


def _stored_responses() -> tuple[Operation, ...]:
    one = "/v1/responses/{response_id}"
    return (
        _get(
            one,
            "retrieve_response",
            "A stored response",
            answers.RESPONSE,
            400,
            *_STORED,
            stream={**BOOLEAN, "enum": [False]},
        ),
        _get(
            f"{one}/input_items",
            "list_input_items",
            "What a stored response answers",
            answers.INPUT_ITEMS,
            400,
            *_STORED,
            limit={**integer(1, MAX_ITEMS_PAGE), "default": ITEMS_PAGE},
            order={**one_of("asc", "desc"), "default": "desc"},
            after=STRING,
        ),
        Operation(
            method="delete",
            path=one,
            name="delete_response",
            summary="Forget a stored response",
            content={JSON: answers.RESPONSE_DELETED},
            errors=_STORED,
        ),
        Operation(
            method="post",
            path=f"{one}/cancel",
            name="cancel_response",
            summary="End a background response",
            content={JSON: answers.RESPONSE},
            errors=(400, *_STORED),
        ),
    )


def _files() -> tuple[Operation, ...]:
    one = "/v1/files/{file_id}"
    order = {**one_of("asc", "desc"), "default": "desc"}
    return (
        Operation(
            method="post",
            path="/v1/files",
            name="upload_file",
            summary="Store a file of requests",
            body={FORM: bodies.upload_form()},
            content={JSON: answers.FILE},
            errors=(*_BODY, 404),
        ),
        _get(
            "/v1/files",
            "list_files",
            "The files of the tenant",
            answers.FILES,
            400,
            404,
            purpose=STRING,
            order=order,
            limit=integer(1, MAX_FILES_PAGE),
            after=STRING,
        ),
        _get(one, "retrieve_file", "One file's description", answers.FILE, 404),
        Operation(
            method="get",
            path=f"{one}/content",
            name="download_file",
            summary="The contents of a file",
            content={BYTES: {**STRING, "contentMediaType": BYTES}},
            errors=(404,),
        ),
        Operation(
            method="delete",
            path=one,
            name="delete_file",
            summary="Forget a file",
            content={JSON: answers.FILE_DELETED},
            errors=(404,),
        ),
    )


def _batches() -> tuple[Operation, ...]:
    one = "/v1/batches/{batch_id}"
    return (
        _post("/v1/batches", "create_batch", "Answer a file", bodies.batch_body(), {JSON: answers.BATCH}, *_BODY, 404),
        _get(
            "/v1/batches",
            "list_batches",
            "The batches of the tenant",
            answers.BATCHES,
            400,
            404,
            limit={**integer(1, MAX_BATCHES_PAGE), "default": BATCHES_PAGE},
            after=STRING,
        ),
        _get(one, "retrieve_batch", "One batch with its progress", answers.BATCH, 404),
        Operation(
            method="post",
            path=f"{one}/cancel",
            name="cancel_batch",
            summary="End a batch",
            content={JSON: answers.BATCH},
            errors=(404, 409),
        ),
    )


def _probes() -> tuple[Operation, ...]:
    return (
        _get("/v1/models", "list_models", "Every served name", answers.MODELS),
        _get("/v1/models/{name}", "get_model", "One served name", answers.MODEL, 404),
        _get("/health", "health", "This process answers", answers.HEALTH),
        Operation(
            method="get",
            path="/ready",
            name="ready",
            summary="A request would be accepted",
            content={JSON: answers.READY},
            unready=answers.NOT_READY,
        ),
        Operation(
            method="get",
            path="/metrics",
            name="metrics",
            summary="Numbers for Prometheus",
            content={METRICS_TYPE: STRING},
        ),
        _get("/openapi.json", "openapi", "This document", {"type": "object", "required": ["openapi", "paths"]}),
    )
