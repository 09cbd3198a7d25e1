"""`/v1/files`: upload, list, describe, download and delete. A file of another tenant is not found."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive

from dsv4_cluster.batches.file_store import StoredFile
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.frontend.batch_desk import BatchDesk
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.query import page_limit

PURPOSE = "batch"
MAX_FILENAME_CHARS = 255
UPLOAD_TIMEOUT_S = 600.0
MAX_PARTS = 16
FORM_OVERHEAD_BYTES = 64 << 10  # of the form around the file
MAX_PAGE = 10_000  # OpenAI's
PIECE_BYTES = 1 << 20


async def upload_file(request: Request, desk: BatchDesk) -> Response:
    """Store the file of a multipart form. Raises: InvalidRequestError, OverloadedError, ClientDisconnect."""
    form = await _form(request, desk.config.max_file_bytes)
    try:
        for name in form:
            if name not in ("file", "purpose") and not desk.ignores_unknown:
                raise FieldError(f"{name!r:.80} is not supported", param=name.partition("[")[0][:80])
        if form.get("purpose") != PURPOSE:
            raise FieldError(f"purpose must be {PURPOSE}: files are kept for batches only", param="purpose")
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise FieldError("file must be a part with a file name", param="file")
        if (upload.size or 0) > desk.config.max_file_bytes:
            raise _too_large(desk.config.max_file_bytes)
        source: Any = upload.file
        name = (upload.filename or "upload.jsonl")[:MAX_FILENAME_CHARS]
        stored = await asyncio.to_thread(
            lambda: desk.files.add(request.state.caller.tenant, source, filename=name, purpose=PURPOSE)
        )
    finally:
        await form.close()
    return JSONResponse(file_object(stored))


async def list_files(request: Request, desk: BatchDesk) -> Response:
    """Files by age, the newest first unless order=asc. Raises: FieldError."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise FieldError("order must be asc or desc", param="order")
    limit = page_limit(query.get("limit"), default=MAX_PAGE, largest=MAX_PAGE)
    files, has_more = await asyncio.to_thread(
        lambda: desk.files.page(
            request.state.caller.tenant,
            after=query.get("after"),
            limit=limit,
            is_ascending=order == "asc",
            purpose=query.get("purpose"),
        )
    )
    return list_response([file_object(stored) for stored in files], has_more=has_more)


async def retrieve_file(request: Request, desk: BatchDesk) -> Response:
    """One file's description. Raises: InvalidRequestError (404)."""
    tenant, file_id = request.state.caller.tenant, request.path_params["file_id"]
    stored = await asyncio.to_thread(desk.files.get, tenant, file_id)
    if stored is None:
        raise _not_found(file_id)
    return JSONResponse(file_object(stored))


async def download_file(request: Request, desk: BatchDesk) -> Response:
    """The contents. Raises: InvalidRequestError (404)."""
    tenant, file_id = request.state.caller.tenant, request.path_params["file_id"]
    found = await asyncio.to_thread(lambda: (desk.files.get(tenant, file_id), desk.files.open(tenant, file_id)))
    stored, contents = found
    if stored is None or contents is None:
        raise _not_found(file_id)
    headers = {
        "content-length": str(stored.num_bytes),
        "content-disposition": f"attachment; filename*=utf-8''{quote(stored.filename)}",
    }
    return StreamingResponse(_pieces(contents), media_type="application/octet-stream", headers=headers)


async def delete_file(request: Request, desk: BatchDesk) -> Response:
    """Forget a file; batches that run on it go on. Raises: InvalidRequestError (404)."""
    file_id = request.path_params["file_id"]
    if not await asyncio.to_thread(desk.files.delete, request.state.caller.tenant, file_id):
        raise _not_found(file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def file_object(stored: StoredFile) -> dict[str, Any]:
    """OpenAI's `file`."""
    return {
        "id": stored.file_id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": stored.created_s,
        "expires_at": None,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_response(objects: list[dict[str, Any]], *, has_more: bool) -> Response:
    """OpenAI's list."""
    ids = [one["id"] for one in objects] or [None]
    return JSONResponse(
        {"object": "list", "data": objects, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
    )


async def _form(request: Request, max_file_bytes: int) -> FormData:
    """Raises: InvalidRequestError."""
    max_bytes = max_file_bytes + FORM_OVERHEAD_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_file_bytes)
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequestError("the request body must be multipart/form-data")
    limited = Request(request.scope, _limited(request.receive, max_bytes, max_file_bytes))
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            return await limited.form(max_files=1, max_fields=MAX_PARTS)
    except HTTPException as err:
        raise InvalidRequestError(f"the request body is not a valid form: {err.detail}") from err
    except TimeoutError:
        message = f"the request body did not arrive within {UPLOAD_TIMEOUT_S:.0f} s"
        raise InvalidRequestError(message, http_status=408) from None


def _limited(receive: Receive, max_bytes: int, max_file_bytes: int) -> Receive:
    """The same messages, until they hold more than `max_bytes`."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise _too_large(max_file_bytes)
        return message

    return limited


async def _pieces(contents: BinaryIO) -> AsyncGenerator[bytes, None]:
    try:
        while piece := await asyncio.to_thread(contents.read, PIECE_BYTES):
            yield piece
    finally:
        contents.close()


def _too_large(max_file_bytes: int) -> InvalidRequestError:
    message = f"the file has more than {max_file_bytes} bytes, router.batches.max_file_bytes"
    return InvalidRequestError(message, http_status=413)


def _not_found(file_id: str) -> InvalidRequestError:
    return FieldError(f"there is no file {file_id!r:.80}", param="file_id", http_status=404)
