"""The lines of batch files: requests in, answers out, as OpenAI's batch format has them."""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dsv4_cluster.batches.claim import AnswerLine
from dsv4_cluster.batches.record import BatchFault
from dsv4_cluster.errors import Dsv4Error, InvalidRequestError
from dsv4_cluster.frontend.body import parse_object

MAX_CUSTOM_ID_CHARS = 512
MAX_FAULTS = 100  # reported of one file; what else is wrong shows on the next try
LINE_OVERHEAD_BYTES = 4096  # of a line around its body
_LINE_KEYS = {"custom_id", "method", "url", "body"}
_NOT_IN_BATCHES = ("stream", "background")  # fields that ask for another kind of answer


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request of a batch."""

    custom_id: str
    body: bytes  # JSON object


class LineError(Dsv4Error):
    """A line that is no request of its batch; becomes a fault of the batch."""

    http_status = 400

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def parse_line(text: bytes, endpoint: str, max_body_bytes: int) -> RequestLine:
    """Raises: LineError."""
    if len(text) > max_body_bytes + LINE_OVERHEAD_BYTES:
        raise LineError("line_too_long", f"the line has {len(text)} bytes, router.max_body_bytes is {max_body_bytes}")
    try:
        line = parse_object(text, "the line")
    except InvalidRequestError as err:
        raise LineError("invalid_json_line", err.message) from err
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineError("invalid_custom_id", message, "custom_id")
    if line.get("method") != "POST":
        raise LineError("invalid_method", "method must be POST", "method")
    if line.get("url") != endpoint:
        raise LineError("invalid_url", f"url must be {endpoint}, the endpoint of the batch", "url")
    unknown = sorted(set(line) - _LINE_KEYS)
    if unknown:
        raise LineError("unknown_parameter", f"unknown key {unknown[0]!r:.80}", unknown[0][:80])
    return RequestLine(custom_id, _checked_body(line.get("body")))


def check_lines(
    lines: Iterable[tuple[int, bytes]], endpoint: str, *, max_lines: int, max_body_bytes: int
) -> tuple[int, tuple[BatchFault, ...]]:
    """Check a whole file; lines: (number, text). Returns: (how many requests, what is wrong: at most MAX_FAULTS)."""
    faults: list[BatchFault] = []
    seen: dict[str, int] = {}
    num_lines = 0
    for number, text in lines:
        num_lines += 1
        try:
            if num_lines > max_lines:
                message = f"the file has more than {max_lines} requests, router.batches.max_lines_per_file"
                raise LineError("too_many_requests", message)
            custom_id = parse_line(text, endpoint, max_body_bytes).custom_id
            first = seen.setdefault(custom_id, number)
            if first != number:
                message = f"custom_id {custom_id!r:.80} is that of line {first} too"
                raise LineError("duplicate_custom_id", message, "custom_id")
        except LineError as err:
            faults.append(BatchFault(code=err.code, message=err.message, param=err.param, line=number))
            if len(faults) == MAX_FAULTS or num_lines > max_lines:
                break
    if not num_lines:
        faults.append(BatchFault(code="empty_file", message="the file has no requests"))
    return num_lines, tuple(faults)


def answer_line(custom_id: str, *, status: int, request_id: str, body: bytes) -> AnswerLine:
    """The result of a request that was answered. body: JSON."""
    one_line = body.replace(b"\n", b" ")  # outside of strings, where JSON has no line ends
    response = b'{"status_code": %d, "request_id": "%b", "body": %b}' % (status, request_id.encode(), one_line)
    return AnswerLine(_line(custom_id, response, b"null"), is_error=not 200 <= status < 300)


def unanswered_line(custom_id: str, code: str, message: str) -> AnswerLine:
    """The result of a request that was never answered."""
    error = json.dumps({"code": code, "message": message}).encode()
    return AnswerLine(_line(custom_id, b"null", error), is_error=True)


def _line(custom_id: str, response: bytes, error: bytes) -> bytes:
    return b'{"id": "batch_req_%b", "custom_id": %b, "response": %b, "error": %b}\n' % (
        uuid.uuid4().hex.encode(),
        json.dumps(custom_id).encode(),
        response,
        error,
    )


def _checked_body(body: Any) -> bytes:
    if not isinstance(body, dict):
        raise LineError("invalid_body", "body must be an object", "body")
    for name in _NOT_IN_BATCHES:
        if body.get(name):
            raise LineError("unsupported_parameter", f"body.{name} is not supported in a batch", f"body.{name}")
    return json.dumps(body).encode()
