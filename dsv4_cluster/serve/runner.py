"""Run a config file on a Ray instance of its own until a signal arrives; `dsv4 serve` behind the curtain."""

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
from ray.serve import scripts

from dsv4_cluster.config.cluster_config import ClusterConfig
from dsv4_cluster.errors import ConfigError, Dsv4Error
from dsv4_cluster.serve.placement import check_placement, live_nodes

POLL_PERIOD_S = 0.25
START_LIMIT_S = 1800.0  # loading a large checkpoint from a network disk takes minutes
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
        if deploy(path, raw, cluster, asked_to_stop):
            http = raw.get("http_options") or {}
            say(f"ready at http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}; Ctrl-C stops everything")
            asked_to_stop.wait()
        say("stopping")
        serve.shutdown()
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
