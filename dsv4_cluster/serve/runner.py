"""Run a config file on a Ray instance of its own until a signal arrives; `dsv4 serve` behind the curtain."""

import asyncio
import contextlib
import io
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import scripts
from ray.serve.exceptions import RayServeException

from dsv4_cluster.config.cluster_config import ClusterConfig
from dsv4_cluster.errors import ConfigError, Dsv4Error
from dsv4_cluster.serve.names import ROUTER
from dsv4_cluster.serve.placement import check_placement, live_nodes

POLL_PERIOD_S = 0.25
START_LIMIT_S = 1800.0  # loading a large checkpoint from a network disk takes minutes
DRAIN_LIMIT_S = 60.0
DRAIN_CALL_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 200 << 20  # KV bytes and tokens never pass through Ray's object store


def run_until_signal(path: Path, raw: dict[str, Any], cluster: ClusterConfig, *, say: Callable[[str], None]) -> None:
    """Start Ray and the graph, wait for SIGINT or SIGTERM, then end both. The environment has been prepared.

    path, raw: the config file and its parsed contents; cluster: our part of it. say: gets one line per event.
    Raises: ConfigError when the graph does not fit or fails to start, Dsv4Error when it does not start in time.
    """
    asked_to_stop = threading.Event()
    say("starting Ray")
    ray.init(
        include_dashboard=False,
        namespace="serve",
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        configure_logging=False,
    )
    try:
        # After ray.init, which installs a SIGTERM handler of its own.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: asked_to_stop.set())
        applications: list[str] = []
        if deploy(path, raw, cluster, asked_to_stop):
            applications = [application["name"] for application in raw["applications"]]
            http = raw.get("http_options") or {}
            say(f"ready at http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}; Ctrl-C stops everything")
            asked_to_stop.wait()
            asked_to_stop.clear()
        asyncio.run(_stop(applications, asked_to_stop, say))
    finally:
        ray.shutdown()


def deploy(path: Path, raw: dict[str, Any], cluster: ClusterConfig, asked_to_stop: threading.Event) -> bool:
    """Start the graph of a config file on the connected Ray cluster, as `serve run` does, and wait until it runs.

    Returns: False when asked to stop before. Raises: ConfigError when it does not fit or fails to start, Dsv4Error when
    it does not start in time.
    """
    check_placement(cluster, live_nodes())
    with contextlib.redirect_stdout(io.StringIO()):  # Serve's own progress messages
        scripts.cli.main(["run", str(path), "--non-blocking", "--address=auto"], standalone_mode=False)
    return _wait_until_running(raw, asked_to_stop)


async def _stop(applications: list[str], asked_again: threading.Event, say: Callable[[str], None]) -> None:
    """Drain the applications that run, then end Serve; on one event loop, which Serve's handles stay tied to."""
    try:
        await _drain(applications, asked_again, say)
    except (TimeoutError, RayError, RayServeException) as err:
        say(f"cannot drain: {err}")
    say("stopping")
    await serve.shutdown_async()


async def _drain(applications: list[str], asked_again: threading.Event, say: Callable[[str], None]) -> None:
    """Let the routers refuse what is new and finish what they have; a second signal or DRAIN_LIMIT_S ends the wait.

    Raises: TimeoutError, RayError, RayServeException when the routers cannot be asked.
    """
    deadline_s = time.monotonic() + DRAIN_LIMIT_S
    routers = [serve.get_deployment_handle(ROUTER, name) for name in applications]
    is_told = False
    while time.monotonic() < deadline_s and not asked_again.is_set():
        try:
            answers = [
                await router.broadcast("drain").results_async(timeout_s=DRAIN_CALL_TIMEOUT_S) for router in routers
            ]
        except (TimeoutError, RayError, RayServeException) as err:
            say(f"cannot drain: {err}")
            return
        num_in_flight = sum(count for counts in answers for count in counts)
        if not num_in_flight:
            return
        if not is_told:
            say(f"waiting for {num_in_flight} requests, at most {DRAIN_LIMIT_S:.0f} s; Ctrl-C again drops them")
            is_told = True
        await asyncio.sleep(POLL_PERIOD_S)


def _wait_until_running(raw: dict[str, Any], asked_to_stop: threading.Event) -> bool:
    """Returns: True when every application runs, False when asked to stop before."""
    names = {application["name"] for application in raw["applications"]}
    deadline_s = time.monotonic() + START_LIMIT_S
    while not asked_to_stop.wait(POLL_PERIOD_S):
        applications = serve.status().applications
        failed = [app for name, app in applications.items() if name in names and "FAILED" in app.status.value]
        if failed:
            raise ConfigError(_reason(failed[0].message))
        if names <= {name for name, app in applications.items() if app.status.value == "RUNNING"}:
            return True
        if time.monotonic() > deadline_s:
            raise Dsv4Error(f"the application did not start within {START_LIMIT_S:.0f} s")
    return False


def _reason(message: str) -> str:
    """The typed error inside the traceback that Serve keeps, or all of it."""
    ours = [line.strip() for line in message.splitlines() if line.strip().startswith("dsv4_cluster.errors.")]
    return ours[-1].partition(": ")[2] if ours else message
