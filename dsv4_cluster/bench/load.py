"""Load on an endpoint: closed loop (a fixed number of users) or open loop (arrivals at a rate, whatever happens).

A closed loop slows down with the server and so hides its queue; an open loop does not. Neither drops a request: an
open loop sends late when this process is too busy, and the delay is reported as `lag`.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from dsv4_cluster.bench.bodies import Dialogue
from dsv4_cluster.bench.client import Endpoint, RequestRecord, send
from dsv4_cluster.bench.workload import Conversation
from dsv4_cluster.clock import Clock
from dsv4_cluster.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """How hard to push. Exactly one of `concurrency` (users) and `rate` (requests per second, on average) is set.

    burstiness: 1 = Poisson arrivals; larger is more regular, smaller comes in bursts (gamma-distributed gaps of
    shape `burstiness`). duration_s: no request starts after it; the ones under way finish.
    """

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    duration_s: float | None = None
    think_time_s: float = 0.0  # between an answer and the next turn
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises: ConfigError that names the field."""
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("give either concurrency or rate")
        for name in ("concurrency", "rate", "burstiness", "duration_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value:g}, expected more than 0")

    @property
    def label(self) -> str:
        """Short name of the load, also its key in reports."""
        if self.concurrency is None:
            return f"{self.rate:g} req/s"
        return "1 user" if self.concurrency == 1 else f"{self.concurrency} users"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Records of all requests that were started, by their send time, and how long the run took."""

    records: tuple[RequestRecord, ...]
    duration_s: float


OnRecord = Callable[[RequestRecord], None]


def arrival_times(num_arrivals: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, ascending, the first one after a gap too. rate: arrivals per second on average."""
    rng = random.Random(seed)
    time_s, times = 0.0, []
    for _ in range(num_arrivals):
        time_s += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(time_s)
    return times


async def run_load(
    endpoint: Endpoint,
    conversations: Sequence[Conversation],
    load: LoadSpec,
    clock: Clock,
    *,
    on_start: Callable[[], None],
    on_record: OnRecord,
) -> RunResult:
    """Send a workload. Records count seconds from the start of the run. Cancelling it closes every connection."""
    timeout = aiohttp.ClientTimeout(total=None)  # each request has its own limit
    connector = aiohttp.TCPConnector(limit=0)  # as many connections as requests in flight
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        runner = _Runner(session, endpoint, load, _RunClock(clock), on_start, on_record)
        await (runner.closed(conversations) if load.concurrency is not None else runner.open(conversations))
        records = sorted(runner.records, key=lambda record: record.sent_s)
        return RunResult(records=tuple(records), duration_s=max((r.done_s for r in records), default=0.0))


class _RunClock:
    """Seconds since the run began."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.now_s()

    def now_s(self) -> float:
        return self._clock.now_s() - self._start_s


class _Runner:
    """The state of one run."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        load: LoadSpec,
        clock: Clock,
        on_start: Callable[[], None],
        on_record: OnRecord,
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._load = load
        self._clock = clock
        self._on_start = on_start
        self._on_record = on_record
        self.records: list[RequestRecord] = []

    async def closed(self, conversations: Sequence[Conversation]) -> None:
        """Every user takes the next conversation when the last one is over."""
        queue = iter(conversations)

        async def user() -> None:
            for conversation in queue:
                await self._converse(conversation, self._clock.now_s())

        async with asyncio.TaskGroup() as users:
            for _ in range(min(self._load.concurrency or 0, len(conversations))):
                users.create_task(user())

    async def open(self, conversations: Sequence[Conversation]) -> None:
        """Conversations start at their times. The rate counts requests, so conversations come at rate / turns."""
        num_turns = sum(len(conversation.turns) for conversation in conversations)
        rate = (self._load.rate or 0.0) * len(conversations) / max(1, num_turns)
        due = arrival_times(len(conversations), rate, self._load.burstiness, self._load.seed)
        async with asyncio.TaskGroup() as started:
            for conversation, due_s in zip(conversations, due, strict=True):
                if self._load.duration_s is not None and due_s >= self._load.duration_s:
                    return
                await asyncio.sleep(due_s - self._clock.now_s())
                started.create_task(self._converse(conversation, due_s))

    async def _converse(self, conversation: Conversation, due_s: float) -> None:
        """All turns in order; a failed turn ends the conversation, because the next one would need its answer."""
        dialogue = Dialogue(conversation, self._endpoint, temperature=self._load.temperature)
        for number, turn in enumerate(conversation.turns):
            if self._is_over():
                return
            body = dialogue.ask(turn)
            record = RequestRecord(conversation=conversation.index, turn=number, due_s=due_s, sent_s=0.0)
            self._on_start()
            self.records.append(record)
            await send(self._session, self._endpoint, body, record, self._clock)
            self._on_record(record)
            if not record.is_ok:
                return
            dialogue.answered(record.text)
            if number + 1 < len(conversation.turns):
                await asyncio.sleep(self._load.think_time_s)
            due_s = self._clock.now_s()

    def _is_over(self) -> bool:
        return self._load.duration_s is not None and self._clock.now_s() >= self._load.duration_s
