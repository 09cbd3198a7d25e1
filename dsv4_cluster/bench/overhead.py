"""Many steady streams against an endpoint whose engine is scripted: what the serving stack itself delivers, and when.

The engine notes CLOCK_MONOTONIC at every step; the client, on the same machine, notes it at every read. Reads are only
stored during the run and taken apart afterwards, so that the client costs little of the machine it measures.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from dsv4_cluster.bench.stats import percentile
from dsv4_cluster.errors import Dsv4Error

MARK = b'"content":" '  # in front of every spoken word, exactly once per token
_MS = 1e3


@dataclass(slots=True)
class StreamLog:
    """One stream: the id that the engine knows it by, and (CLOCK_MONOTONIC seconds, bytes) of every read."""

    request_id: str
    reads: list[tuple[float, bytes]]

    def token_times_s(self) -> list[float]:
        """When each token had arrived in full."""
        times: list[float] = []
        tail = b""
        for at_s, data in self.reads:
            joined = tail + data
            times += [at_s] * joined.count(MARK)
            tail = joined[-(len(MARK) - 1) :]
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadResult:
    """Rates in tokens per second, latencies in milliseconds from the engine's step to the client's read."""

    num_streams: int
    offered_rate: float
    delivered_rate: float
    window_s: float
    num_tokens: int
    latency_p50_ms: float
    latency_p99_ms: float
    latency_max_ms: float


async def run_streams(
    url: str, model: str, num_streams: int, tokens_per_stream: int, on_token: Callable[[int], None]
) -> list[StreamLog]:
    """Open all streams at once and read each to its end. on_token: hears of the reads, for a progress bar.

    Raises: Dsv4Error when a stream is refused.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "go on"}],
            "thinking": {"type": "disabled"},
            "max_tokens": tokens_per_stream,
            "stream": True,
        }
        return await asyncio.gather(*[_one(session, url, body, on_token) for _ in range(num_streams)])


def summarise(
    logs: Sequence[StreamLog], first_steps: Mapping[str, int], step_times_s: Sequence[float], steps_per_s: float
) -> OverheadResult:
    """Compare what arrived with what was spoken, in the window in which every stream ran.

    first_steps: by request id. step_times_s: CLOCK_MONOTONIC seconds of every engine step.
    """
    arrivals = [log.token_times_s() for log in logs]
    spoken = [step_times_s[first_steps[log.request_id] :] for log in logs]
    start_s = max(times[1] for times in arrivals)
    end_s = min(times[-1] for times in arrivals)
    latencies = sorted(
        (arrived_s - spoken_s) * _MS
        for times, steps in zip(arrivals, spoken, strict=True)
        for arrived_s, spoken_s in zip(times[1:], steps, strict=False)  # the first token is prefill's
        if start_s <= arrived_s <= end_s
    )
    window_s = end_s - start_s
    return OverheadResult(
        num_streams=len(logs),
        offered_rate=len(logs) * steps_per_s,
        delivered_rate=len(latencies) / window_s,
        window_s=window_s,
        num_tokens=len(latencies),
        latency_p50_ms=percentile(latencies, 50),
        latency_p99_ms=percentile(latencies, 99),
        latency_max_ms=latencies[-1],
    )


async def _one(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, object], on_token: Callable[[int], None]
) -> StreamLog:
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise Dsv4Error(f"a stream was refused with {response.status}: {(await response.text())[:200]}")
        log = StreamLog(response.headers["x-request-id"].replace("req-", "chatcmpl-", 1), [])
        async for data in response.content.iter_any():
            log.reads.append((time.monotonic(), data))
            on_token(1)
    return log
