"""`dsv4 bench serve`: find the model, warm up, run the load points one after the other, sum up."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Protocol

import aiohttp

from dsv4_cluster.bench.client import Endpoint, RequestRecord
from dsv4_cluster.bench.hardware import describe_hardware
from dsv4_cluster.bench.load import LoadSpec, RunResult, run_load
from dsv4_cluster.bench.serve_report import ServeReport
from dsv4_cluster.bench.serve_summary import SLO, PointSummary, summarise
from dsv4_cluster.bench.workload import WorkloadSpec, make_workload, warmup_workload
from dsv4_cluster.clock import Clock
from dsv4_cluster.errors import ConfigError

_LOOKUP_TIMEOUT_S = 10.0
_WARMUP_USERS = 8


class ServeObserver(Protocol):
    """Who watches a run: a progress display, or nobody."""

    def point_started(self, label: str, num_requests: int) -> None:
        """A warm-up or a load point begins."""
        ...

    def request_started(self) -> None:
        """A request is about to be sent."""
        ...

    def request_done(self, record: RequestRecord) -> None:
        """A request is over."""
        ...

    def point_done(self, point: PointSummary, result: RunResult) -> None:
        """A load point is summed up; `result` is not kept anywhere else."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """A run to do."""

    endpoint: Endpoint
    workload: WorkloadSpec
    loads: tuple[LoadSpec, ...]
    slo: SLO
    num_warmup: int

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        if not self.loads:
            raise ConfigError("no load point: give a concurrency or a rate")
        if self.num_warmup < 0:
            raise ConfigError(f"num_warmup is {self.num_warmup}, expected at least 0")


async def find_model(base_url: str, api_key: str | None) -> str:
    """The first served name. Raises: ConfigError when the server does not answer or serves nothing."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=_LOOKUP_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base_url}/v1/models", headers=headers) as response,
        ):
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as err:
        raise ConfigError(f"no answer from {base_url}/v1/models: {err or type(err).__name__}") from err
    except (ValueError, LookupError, TypeError) as err:
        raise ConfigError(f"{base_url}/v1/models lists no model; name one with --model") from err


async def run_serve(run: ServeRun, clock: Clock, observer: ServeObserver) -> ServeReport:
    """Warm up and measure. Load points share lengths and differ in texts, so that none finds another's prefixes."""
    await _warm_up(run, clock, observer)
    points = []
    for index, load in enumerate(run.loads):
        observer.point_started(load.label, run.workload.num_requests)
        result = await run_load(
            run.endpoint,
            make_workload(run.workload, text_salt=str(index)),
            load,
            clock,
            on_start=observer.request_started,
            on_record=observer.request_done,
        )
        point = summarise(load, result, run.slo)
        observer.point_done(point, result)
        points.append(point)
    return _report(run, points)


async def _warm_up(run: ServeRun, clock: Clock, observer: ServeObserver) -> None:
    conversations = warmup_workload(run.workload, run.num_warmup)
    if not conversations:
        return
    observer.point_started("warm-up", len(conversations))
    load = LoadSpec(concurrency=min(_WARMUP_USERS, len(conversations)))
    await run_load(
        run.endpoint,
        conversations,
        load,
        clock,
        on_start=observer.request_started,
        on_record=observer.request_done,
    )


def _report(run: ServeRun, points: Sequence[PointSummary]) -> ServeReport:
    first = run.loads[0]
    return ServeReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        base_url=run.endpoint.base_url,
        api=run.endpoint.api,
        model=run.endpoint.model,
        client=describe_hardware(),
        version=version("dsv4-cluster"),
        workload=run.workload,
        num_warmup=run.num_warmup,
        temperature=first.temperature,
        burstiness=first.burstiness,
        think_time_s=first.think_time_s,
        timeout_s=run.endpoint.timeout_s,
        extra_body=dict(run.endpoint.extra_body),
        slo=run.slo,
        points=tuple(points),
    )
