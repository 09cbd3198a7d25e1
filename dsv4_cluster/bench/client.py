"""One request against an OpenAI endpoint, with the arrival time of every piece of its answer.

aiohttp rather than httpx: measured on one core, 20 us of CPU per event instead of 62. The client shares the machine
with the server in most local runs, and what it burns shows up in the latencies.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from dsv4_cluster.bench.sse import SSEDecoder
from dsv4_cluster.clock import Clock

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_DONE = b"[DONE]"
_MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to send requests and what every one of them carries."""

    base_url: str
    api: Api
    model: str
    timeout_s: float
    api_key: str | None = None
    extra_body: Mapping[str, object] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        key = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return {"content-type": "application/json", **key}


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What became of one request. Times are seconds on the run's clock; `event_s` are pieces that carry text."""

    conversation: int
    turn: int
    due_s: float  # when the load plan wanted it sent
    sent_s: float
    event_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    text: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    error_kind: str | None = None  # None = answered in full
    error_message: str = ""

    @property
    def is_ok(self) -> bool:
        """True when the answer came in full."""
        return self.error_kind is None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first piece of text; None for an answer without text."""
        return self.event_s[0] - self.sent_s if self.event_s else None

    @property
    def e2e_s(self) -> float:
        """Time to the last byte."""
        return self.done_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first one; None for fewer than two tokens or pieces."""
        if len(self.event_s) < 2 or self.num_output_tokens < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between pieces of text. A piece holds several tokens when the server sends several at once."""
        return [later - earlier for earlier, later in zip(self.event_s, self.event_s[1:], strict=False)]


async def send(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: Mapping[str, object], record: RequestRecord, clock: Clock
) -> None:
    """Send one streamed request and fill `record`. Failures become `error_kind`; only cancellation is raised."""
    payload = json.dumps(body).encode()
    record.sent_s = clock.now_s()
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            await _stream(session, endpoint, payload, record, clock)
    except TimeoutError:
        _fail(record, "timeout", f"no complete answer after {endpoint.timeout_s:g} s")
    except aiohttp.ClientConnectorError as err:
        _fail(record, "connect", str(err))
    except (aiohttp.ClientError, OSError) as err:
        _fail(record, "broken", f"{type(err).__name__}: {err}")
    finally:
        record.done_s = clock.now_s()


async def _stream(
    session: aiohttp.ClientSession, endpoint: Endpoint, payload: bytes, record: RequestRecord, clock: Clock
) -> None:
    url = endpoint.base_url + PATHS[endpoint.api]
    async with session.post(url, data=payload, headers=endpoint.headers) as response:
        if response.status != 200:
            _fail(record, f"http {response.status}", _message(await response.text()))
            return
        decoder, is_done = SSEDecoder(), False
        async for raw in response.content.iter_any():
            now_s = clock.now_s()  # before any parsing
            for event in decoder.feed(raw):
                is_done = is_done or event == _DONE
                if event != _DONE:
                    _take_event(record, event, now_s)
        if record.error_kind is None and not is_done:
            _fail(record, "truncated", "the stream ended without [DONE]")


def _take_event(record: RequestRecord, event: bytes, now_s: float) -> None:
    try:
        value = json.loads(event)
        if "error" in value:
            _fail(record, "in stream", _message(event.decode()))
            return
        _take_usage(record, value.get("usage"))
        for choice in value.get("choices") or ():
            text = _text(choice)
            if text:
                record.event_s.append(now_s)
                record.text += text
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
    except (ValueError, TypeError, AttributeError, KeyError) as err:
        _fail(record, "not understood", f"{type(err).__name__} in {event[:80]!r}")


def _text(choice: Mapping[str, Any]) -> str:
    """Text of a chunk: answer, thoughts and tool arguments alike, because all of them are generated tokens."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    calls = "".join((call.get("function") or {}).get("arguments") or "" for call in delta.get("tool_calls") or ())
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "") + calls


def _take_usage(record: RequestRecord, usage: Mapping[str, Any] | None) -> None:
    if usage is None:
        return
    record.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
    record.num_output_tokens = int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    record.num_cached_tokens = int(details.get("cached_tokens") or usage.get("prompt_cache_hit_tokens") or 0)


def _fail(record: RequestRecord, kind: str, message: str) -> None:
    """Keep the first failure; what follows is its consequence."""
    if record.error_kind is None:
        record.error_kind, record.error_message = kind, message[:_MAX_ERROR_CHARS]


def _message(body: str) -> str:
    """The message of an error envelope, or the body as it is."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return body
