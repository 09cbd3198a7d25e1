"""`/v1/batches`: create, list, describe and cancel. A batch of another tenant is not found."""

import asyncio
import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dsv4_cluster.batches.layout import BATCH_PREFIX, FILE_PREFIX, new_id
from dsv4_cluster.batches.record import BatchRecord, BatchUsage
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.frontend.batch_desk import BatchDesk
from dsv4_cluster.frontend.body import parse_object, read_body
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.field_table import FieldTable
from dsv4_cluster.frontend.files import PURPOSE, list_response
from dsv4_cluster.frontend.query import page_limit

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WINDOW, WINDOW_S = "24h", 24 * 3600  # OpenAI's only one
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MAX_PAGE, DEFAULT_PAGE = 100, 20
BATCHES = FieldTable(
    honoured=frozenset({"input_file_id", "endpoint", "completion_window", "metadata"}),
    refused={"output_expires_after": ()},
)


async def create_batch(request: Request, desk: BatchDesk) -> Response:
    """Take a batch in; it is checked and answered in the background. Raises: Dsv4Error, ClientDisconnect."""
    body = parse_object(await read_body(request, desk.max_body_bytes))
    fields = _checked(body, desk)
    caller = request.state.caller
    stored = await asyncio.to_thread(desk.files.get, caller.tenant, fields["input_file_id"])
    if stored is not None and stored.purpose != PURPOSE:
        raise FieldError(f"the file's purpose is {stored.purpose}, not {PURPOSE}", param="input_file_id")
    created_s = int(time.time())
    record = BatchRecord(
        batch_id=new_id(BATCH_PREFIX),
        tenant=caller.tenant,
        key_name=caller.key_name,
        endpoint=fields["endpoint"],
        input_file_id=fields["input_file_id"],
        output_file_id=new_id(FILE_PREFIX),
        error_file_id=new_id(FILE_PREFIX),
        completion_window=WINDOW,
        metadata=fields["metadata"],
        created_s=created_s,
        expires_s=created_s + WINDOW_S,
    )
    if stored is None or not await asyncio.to_thread(desk.batches.create, record):
        raise FieldError(f"there is no file {record.input_file_id!r:.80}", param="input_file_id", http_status=404)
    desk.runner.wake()
    return JSONResponse(batch_object(record))


async def list_batches(request: Request, desk: BatchDesk) -> Response:
    """Batches, the newest first. Raises: FieldError."""
    query = request.query_params
    limit = page_limit(query.get("limit"), default=DEFAULT_PAGE, largest=MAX_PAGE)
    records, has_more = await asyncio.to_thread(
        lambda: desk.batches.page(request.state.caller.tenant, after=query.get("after"), limit=limit)
    )
    return list_response([batch_object(record) for record in records], has_more=has_more)


async def retrieve_batch(request: Request, desk: BatchDesk) -> Response:
    """One batch with its progress. Raises: InvalidRequestError (404)."""
    return JSONResponse(batch_object(await _found(request, desk)))


async def cancel_batch(request: Request, desk: BatchDesk) -> Response:
    """End a batch; what is answered stays. Raises: InvalidRequestError (404, and 409 when it is over)."""
    record = await _found(request, desk)
    if record.is_over:
        raise InvalidRequestError(f"{record.batch_id} is {record.status} and cannot be cancelled", http_status=409)
    await asyncio.to_thread(desk.batches.ask_to_cancel, record.tenant, record.batch_id)
    return JSONResponse(batch_object(await _found(request, desk)))


def batch_object(record: BatchRecord) -> dict[str, Any]:
    """OpenAI's `batch`."""
    reached = record.reached_s
    faults = {"object": "list", "data": [dataclasses.asdict(fault) for fault in record.faults]}
    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": faults if record.faults else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "output_file_id": record.output_file_id if record.has_output else None,
        "error_file_id": record.error_file_id if record.has_errors else None,
        "created_at": record.created_s,
        "in_progress_at": reached.get("in_progress"),
        "expires_at": record.expires_s,
        "finalizing_at": reached.get("finalizing"),
        "completed_at": reached.get("completed"),
        "failed_at": reached.get("failed"),
        "expired_at": reached.get("expired"),
        "cancelling_at": reached.get("cancelling"),
        "cancelled_at": reached.get("cancelled"),
        "request_counts": {
            "total": record.num_total,
            "completed": record.num_completed,
            "failed": record.num_failed,
        },
        "metadata": record.metadata,
        "model": record.model,
        "usage": _usage(record.usage),
    }


def _usage(usage: BatchUsage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.num_input_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_input_tokens + usage.num_output_tokens,
    }


async def _found(request: Request, desk: BatchDesk) -> BatchRecord:
    batch_id = request.path_params["batch_id"]
    record = await asyncio.to_thread(desk.batches.get, request.state.caller.tenant, batch_id)
    if record is None:
        raise FieldError(f"there is no batch {batch_id!r:.80}", param="batch_id", http_status=404)
    return record


def _checked(body: dict[str, Any], desk: BatchDesk) -> dict[str, Any]:
    """The fields of a new batch. Raises: FieldError."""
    fields = BATCHES.taken_from(body, ignores_unknown=desk.ignores_unknown)
    if not isinstance(fields.get("input_file_id"), str):
        raise FieldError("input_file_id must be a string", param="input_file_id")
    if fields.get("endpoint") not in ENDPOINTS:
        raise FieldError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    if fields.get("completion_window") != WINDOW:
        raise FieldError(f"completion_window must be {WINDOW}", param="completion_window")
    return {**fields, "metadata": _metadata(fields.get("metadata"))}


def _metadata(value: Any) -> dict[str, str] | None:
    """Raises: FieldError."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise FieldError(f"metadata must be an object with at most {MAX_METADATA} keys", param="metadata")
    for key, inner in value.items():
        if len(key) > MAX_KEY_CHARS or not isinstance(inner, str) or len(inner) > MAX_VALUE_CHARS:
            raise FieldError(
                f"metadata: keys have at most {MAX_KEY_CHARS} characters, values are strings of at most "
                f"{MAX_VALUE_CHARS}",
                param="metadata",
            )
    return value
