"""`/v1/responses`: create, retrieve, delete and cancel a response, list its input, count its tokens."""

import dataclasses
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.frontend.body import parse_object, read_body
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.extra_fields import take_seed
from dsv4_cluster.frontend.field_table import FieldTable
from dsv4_cluster.frontend.fields import take_priority, take_thinking_budget
from dsv4_cluster.frontend.generation import Backend
from dsv4_cluster.frontend.query import page_limit
from dsv4_cluster.frontend.reply import named_reply, whole_reply
from dsv4_cluster.frontend.response_fields import INPUT_TOKENS, RESPONSES, ResponseFields, check_responses
from dsv4_cluster.frontend.response_object import cancelled_body, dumps, echoed, item_page
from dsv4_cluster.frontend.response_run import ResponseJob, ResponseRun
from dsv4_cluster.frontend.sampling_fields import take_sampling_fields
from dsv4_cluster.frontend.turn import Turn, check_budget, check_structured
from dsv4_cluster.protocol.stored_response import StoredResponse
from dsv4_cluster.tokenizer.responses_family import RESPONSES as FAMILY

MAX_PAGE, DEFAULT_PAGE = 100, 20  # OpenAI's
_ANY_LENGTH = 2**31  # counting does not ask whether the prompt fits


async def create_response(request: Request, backend: Backend) -> Response:
    """Answer a Responses request: streamed, whole, or in the background. Raises: Dsv4Error, ClientDisconnect."""
    raw = await read_body(request, backend.config.max_body_bytes)
    body, fields = await backend.off_loop(lambda: _checked(raw, RESPONSES, backend))
    tenant = request.state.caller.tenant
    is_stored = _is_stored(fields, backend)
    earlier = await _earlier(fields.previous_response_id, tenant, backend)
    turn, items = await backend.off_loop(lambda: _encoded(fields, earlier, backend))
    request_id = request.state.request_id
    echo = echoed(body, is_stored=is_stored)
    job = ResponseJob(turn=turn, items=items, echo=echo, tenant=tenant, is_stored=is_stored)
    generation = turn.generation(request_id.replace("req-", "resp_", 1), backend, request.state.caller)
    run = ResponseRun(job, generation, backend)
    if fields.is_background:
        backend.background.check_room()
        await backend.responses.add(run.record(is_over=False))
        queued = dumps(run.response)
        backend.background.start(run.in_background(request_id), place=request.state.place.pop_all())
        return Response(queued, media_type="application/json")
    if turn.prompt.is_stream:
        return await named_reply(request, backend, run.stream(), lambda err: run.failure(err, request_id))
    return await whole_reply(request, backend, run.whole())


async def count_input_tokens(request: Request, backend: Backend) -> Response:
    """The length of the prompt that `create_response` would compute. Raises: Dsv4Error, ClientDisconnect."""
    raw = await read_body(request, backend.config.max_body_bytes)
    _, fields = await backend.off_loop(lambda: _checked(raw, INPUT_TOKENS, backend))
    earlier = await _earlier(fields.previous_response_id, request.state.caller.tenant, backend)

    def count() -> int:
        items = [*_history(earlier), *fields.items]
        body = {**fields.body, "input": items} if items else fields.body
        return len(backend.codec.chat.encode(body, family=FAMILY, context_limit=_ANY_LENGTH).token_ids)

    return JSONResponse({"object": "response.input_tokens", "input_tokens": await backend.off_loop(count)})


async def retrieve_response(request: Request, backend: Backend) -> Response:
    """The latest state of a stored response. Raises: InvalidRequestError (404)."""
    if request.query_params.get("stream") == "true":
        raise FieldError("a stored response cannot be streamed again", param="stream")
    return Response((await _found(request, backend)).body, media_type="application/json")


async def delete_response(request: Request, backend: Backend) -> Response:
    """Forget a stored response; one that is generated in the background ends. Raises: InvalidRequestError (404)."""
    record = await _found(request, backend)
    await backend.responses.delete(record.tenant, record.response_id)
    return JSONResponse({"id": record.response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request, backend: Backend) -> Response:
    """End a background response; one that is over stays as it is. Raises: InvalidRequestError (404, 400)."""
    record = await _found(request, backend)
    if json.loads(record.body)["background"] is not True:
        raise InvalidRequestError(f"{record.response_id} is no background response; only those can be cancelled")
    if not record.is_over:
        ended = dataclasses.replace(record, body=cancelled_body(record.body), is_over=True)
        if not await backend.responses.replace(ended):
            return await retrieve_response(request, backend)
        record = ended
    return Response(record.body, media_type="application/json")


async def list_input_items(request: Request, backend: Backend) -> Response:
    """A page of the items that a stored response answers, the latest first unless asked otherwise.

    Raises: InvalidRequestError (404), FieldError.
    """
    query = request.query_params
    order = query.get("order", "desc")
    limit = page_limit(query.get("limit"), default=DEFAULT_PAGE, largest=MAX_PAGE)
    if order not in ("asc", "desc"):
        raise FieldError(f"order is {order!r:.20}, expected asc or desc", param="order")
    record = await _found(request, backend)

    def page_of() -> dict[str, Any] | None:
        items = json.loads(record.items)
        return item_page(items, after=query.get("after"), limit=limit, is_ascending=order == "asc")

    page = await backend.off_loop(page_of)
    if page is None:
        raise FieldError(f"after names {query.get('after')!r:.80}, which is no item of this response", param="after")
    return JSONResponse(page)


def _checked(raw: bytes, table: FieldTable, backend: Backend) -> tuple[dict[str, Any], ResponseFields]:
    body = parse_object(raw)
    return body, check_responses(body, table, ignores_unknown=backend.ignores_unknown)


def _is_stored(fields: ResponseFields, backend: Backend) -> bool:
    """Raises: FieldError when the client asks for what this server is configured not to do."""
    config = backend.config.responses
    if fields.is_background and config.max_background == 0:
        raise FieldError("background is switched off on this server", param="background")
    if config.max_entries == 0 and (fields.wants_storage or fields.is_background):
        raise FieldError("store: this server keeps no responses", param="store")
    return config.max_entries > 0 and fields.wants_storage is not False


async def _earlier(response_id: str | None, tenant: str, backend: Backend) -> StoredResponse | None:
    """An earlier response. Raises: FieldError (404) when it is not there."""
    if response_id is None:
        return None
    record = await backend.responses.get(tenant, response_id)
    if record is None:
        name = "previous_response_id"
        raise FieldError(f"{name}: no stored response has the id {response_id!r:.80}", param=name, http_status=404)
    return record


def _history(record: StoredResponse | None) -> list[Any]:
    """Everything up to the end of an earlier response. Raises: FieldError when it has no good end."""
    if record is None:
        return []
    body = json.loads(record.body)
    if body["status"] not in ("completed", "incomplete"):
        name = "previous_response_id"
        raise FieldError(f"{name}: {record.response_id} is {body['status']}, not completed", param=name)
    return [*json.loads(record.items), *body["output"]]


def _encoded(fields: ResponseFields, earlier: StoredResponse | None, backend: Backend) -> tuple[Turn, str]:
    """Everything that costs CPU; runs on the encode pool. Returns also all input items as JSON."""
    body, items = dict(fields.body), [*_history(earlier), *fields.items]
    sampling = take_sampling_fields(body, vocab_size=backend.codec.text.vocab_size)
    seed, priority, budget = take_seed(body), take_priority(body), take_thinking_budget(body)
    if items:
        body["input"] = items
    prompt = backend.codec.chat.encode(
        body, family=FAMILY, context_limit=backend.max_model_len, is_single_call=fields.is_single_call
    )
    if prompt.structured is not None:
        check_structured(prompt.structured, sampling, param="text.format")
    check_budget(budget, prompt)
    turn = Turn(
        prompt=prompt,
        sampling=sampling,
        seed=seed,
        thinking_budget=budget,
        user_id=fields.user_id,
        priority=priority,
    )
    return turn, dumps(items)


async def _found(request: Request, backend: Backend) -> StoredResponse:
    """Raises: InvalidRequestError (404)."""
    response_id = request.path_params["response_id"]
    record = await backend.responses.get(request.state.caller.tenant, response_id)
    if record is None:
        raise InvalidRequestError(f"no stored response has the id {response_id!r:.80}", http_status=404)
    return record
