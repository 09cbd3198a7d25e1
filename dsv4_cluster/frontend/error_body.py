"""Errors as bodies, streamed or not: OpenAI's envelope `{"error": {"message", "type", "param", "code"}}`, and on the
paths of the Messages API Anthropic's, `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.responses import Response

from dsv4_cluster import errors

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_GONE_STATUS = 499  # never on the wire: there is nobody to read it
_CODES: dict[type[errors.Dsv4Error], str] = {
    errors.PromptTooLongError: "context_length_exceeded",
    errors.ModelNotFoundError: "model_not_found",
    errors.InvalidRequestError: "invalid_request_error",
    errors.AuthError: "invalid_api_key",
    errors.OverloadedError: "rate_limit_exceeded",
    errors.DrainingError: "draining",
    errors.DeadlineExceededError: "deadline_exceeded",
    errors.KVTransferError: "kv_transfer_failed",
    errors.WorkerLostError: "worker_lost",
    errors.NonFiniteLogitsError: "non_finite_logits",
    errors.Dsv4Error: "internal_error",
}
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
MESSAGES_PATH = "/v1/messages"
_MAX_MESSAGE_CHARS, _MAX_PARAM_CHARS = 2000, 200  # messages quote what the client wrote, which may be megabytes
ANTHROPIC_BASE = "/anthropic"


class FieldError(errors.InvalidRequestError):
    """A request field that is wrong or not supported; stays inside the front end."""

    def __init__(self, message: str, *, param: str, http_status: int | None = None) -> None:
        super().__init__(message, http_status=http_status)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """What a client is told about a failure."""

    status: int
    message: str
    type: str
    param: str | None
    code: str
    retryable: bool


Envelope: TypeAlias = Callable[[ErrorBody, str], str]  # description, request id -> JSON


def openai_envelope(body: ErrorBody, _: str) -> str:
    """The body of every path but those of the Messages API."""
    error = {"message": body.message, "type": body.type, "param": body.param, "code": body.code}
    return json.dumps({"error": error}, ensure_ascii=False)


def anthropic_envelope(body: ErrorBody, request_id: str) -> str:
    """The body on the paths of the Messages API."""
    default = "invalid_request_error" if body.status < 500 else "api_error"
    error = {"type": _ANTHROPIC_TYPES.get(body.status, default), "message": body.message}
    return json.dumps({"type": "error", "error": error, "request_id": request_id}, ensure_ascii=False)


def is_messages_path(path: str) -> bool:
    """True below `/v1/messages`, also under the base path of DeepSeek's hosted API."""
    return path.removeprefix(ANTHROPIC_BASE).startswith(MESSAGES_PATH)


def envelope_of(path: str) -> Envelope:
    """How errors look on a path, whatever raises them."""
    return anthropic_envelope if is_messages_path(path) else openai_envelope


def describe(err: Exception, request_id: str) -> ErrorBody:
    """Translate an exception; one that is not ours is logged with its traceback and not shown to the client."""
    if not isinstance(err, errors.Dsv4Error):
        logger.error("%s: internal error", request_id, exc_info=err)
        err = errors.Dsv4Error(f"internal error; the request id is {request_id}")
    elif err.http_status >= 500:
        logger.warning("%s: %s", request_id, err)
    param = getattr(err, "param", None)
    if param is None and isinstance(err, errors.ModelNotFoundError):
        param = "model"
    default_type = "invalid_request_error" if err.http_status < 500 else "server_error"
    return ErrorBody(
        status=err.http_status,
        message=_shortened(err.message, _MAX_MESSAGE_CHARS),
        type=_TYPES.get(err.http_status, default_type),
        param=None if param is None else _shortened(param, _MAX_PARAM_CHARS),
        code=_code(err),
        retryable=err.retryable,
    )


def _code(err: errors.Dsv4Error) -> str:
    if isinstance(err, errors.OverloadedError) and err.http_status != errors.OverloadedError.http_status:
        return "overloaded"  # by others, not by what this client sent
    return next(_CODES[cls] for cls in type(err).__mro__ if cls in _CODES)


def _shortened(text: str, max_chars: int) -> str:
    """The text, or its beginning and its end."""
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]}[...]{text[-half:]}"


def described_json(err: Exception, request_id: str, path: str) -> str:
    """The body of an exception, in the envelope of a path."""
    return envelope_of(path)(describe(err, request_id), request_id)


def error_response(err: Exception, request_id: str, path: str) -> Response:
    """The whole HTTP answer for an exception raised before the first byte of a body. path: of the request."""
    body = describe(err, request_id)
    headers: dict[str, str] = {}
    if body.retryable and body.status in (429, 503):
        wait_s = getattr(err, "retry_after_s", None) or RETRY_AFTER_S
        headers["retry-after"] = str(math.ceil(wait_s))
    if body.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        envelope_of(path)(body, request_id), status_code=body.status, media_type="application/json", headers=headers
    )
