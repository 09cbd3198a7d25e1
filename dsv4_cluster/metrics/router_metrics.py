"""What a router process counts about the requests that pass through it, for Prometheus.

Times are on this process's monotonic clock, in seconds: TTFT from the request's start at the service to its first
chunk, gaps between chunks, and the whole answer. A chunk holds more than one token under speculation.
"""

from asyncio import CancelledError
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dsv4_cluster.clock import Clock
from dsv4_cluster.errors import Dsv4Error
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_TOKENS = tuple(4**i for i in range(2, 11))  # 16 to 1,048,576


@dataclass(slots=True)
class _Times:
    started_s: float
    last_chunk_s: float | None = None
    num_generated: int = 0
    finish_reason: str | None = None


class RouterMetrics:
    """Counters and histograms of one router, registered in the registry it is given; an observer of its service."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._clock = clock
        self._running: dict[str, _Times] = {}
        self._answers = Counter(
            "dsv4_http_responses", "HTTP answers by route and status", ["route", "status"], registry=registry
        )
        self._ended = Counter("dsv4_requests", "Generations by how they ended", ["reason"], registry=registry)
        self._in_flight = Gauge("dsv4_requests_in_flight", "Generations under way in this router", registry=registry)
        self._prompt = Counter("dsv4_prompt_tokens", "Prompt tokens taken in", registry=registry)
        self._cached = Counter("dsv4_cached_prompt_tokens", "Prompt tokens found in the cache", registry=registry)
        self._generated = Counter("dsv4_generated_tokens", "Tokens generated", registry=registry)
        self._drafted = Counter("dsv4_drafted_tokens", "Tokens drafted by speculation", registry=registry)
        self._accepted = Counter("dsv4_accepted_tokens", "Drafted tokens that stood", registry=registry)
        self._ttft = Histogram(
            "dsv4_time_to_first_token_seconds", "Start to first chunk", buckets=_LATENCY_S, registry=registry
        )
        self._gap = Histogram(
            "dsv4_inter_chunk_seconds", "Gap between two chunks of an answer", buckets=_GAP_S, registry=registry
        )
        self._e2e = Histogram("dsv4_request_seconds", "Start to end", buckets=_LATENCY_S, registry=registry)
        self._prompt_sizes = Histogram("dsv4_prompt_size_tokens", "Prompt lengths", buckets=_TOKENS, registry=registry)
        self._answer_sizes = Histogram("dsv4_answer_size_tokens", "Answer lengths", buckets=_TOKENS, registry=registry)

    def count_answer(self, route: str, status: int) -> None:
        """One HTTP answer."""
        self._answers.labels(route, str(status)).inc()

    def started(self, request: GenerationRequest) -> None:
        """See frontend/observed.py."""
        self._running[request.request_id] = _Times(self._clock.now_s())
        self._in_flight.inc()
        self._prompt.inc(len(request.prompt_token_ids))
        self._prompt_sizes.observe(len(request.prompt_token_ids))

    def answered(self, request: GenerationRequest, chunk: TokenChunk, *, is_first: bool) -> None:
        """See frontend/observed.py."""
        times = self._running[request.request_id]
        now_s = self._clock.now_s()
        if is_first:
            self._ttft.observe(now_s - times.started_s)
            self._cached.inc(chunk.num_cached_tokens)
        elif times.last_chunk_s is not None:
            self._gap.observe(now_s - times.last_chunk_s)
        times.last_chunk_s = now_s
        times.num_generated += len(chunk.token_ids)
        self._generated.inc(len(chunk.token_ids))
        if chunk.num_drafted:
            self._drafted.inc(chunk.num_drafted)
            self._accepted.inc(chunk.num_accepted)
        if chunk.finish_reason is not None:
            times.finish_reason = str(chunk.finish_reason)

    def ended(self, request: GenerationRequest, failure: BaseException | None) -> None:
        """See frontend/observed.py."""
        times = self._running.pop(request.request_id)
        self._in_flight.dec()
        self._ended.labels(_reason(times, failure)).inc()
        self._e2e.observe(self._clock.now_s() - times.started_s)
        self._answer_sizes.observe(times.num_generated)


def _reason(times: _Times, failure: BaseException | None) -> str:
    """stop, length, aborted (the client left, or a stop string ended it), or the error's class."""
    if times.finish_reason is not None:
        return times.finish_reason
    if isinstance(failure, Dsv4Error):
        return type(failure).__name__
    return "aborted" if failure is None or isinstance(failure, GeneratorExit | CancelledError) else "internal_error"
