"""A local Ray cluster that serves the toy checkpoint, and ways to look inside it.

This process imports Ray Serve before the throughput settings are in the environment, so its own handles may be used
from synchronous code; the processes of the cluster start afterwards and have the settings. The graph is built inside
the cluster, as from any config file, because handles carry the settings of the process that builds them.
"""

import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve

from dsv4_cluster.config.cluster_config import ClusterConfig
from dsv4_cluster.config.load import BUILDER, load_serve_file
from dsv4_cluster.serve.environment import prepare_single_machine
from dsv4_cluster.serve.runner import deploy
from dsv4_cluster.worker.spec import WorkerAudit, WorkerInfo
from tests.kit.clock import WAIT_LIMIT_S, wait_until

APP = "dsv4"
MODEL = "toy"
HOST = "127.0.0.1"
NUM_CPUS = 2
OBJECT_STORE_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster."""

    base_url: str
    port: int
    config: ClusterConfig

    def ask_all(self, deployment: str, method: str, *args: object) -> list[Any]:
        """Call a method on every replica of a deployment."""
        handle = serve.get_deployment_handle(deployment, APP)
        return handle.broadcast(method, *args).results(timeout_s=20)

    def audits(self, deployment: str) -> list[WorkerAudit]:
        """Accounting of every worker of a role, checked by the engine itself."""
        return [audit for audits in self.ask_all(deployment, "audit") for audit in audits]

    def workers(self, deployment: str) -> list[WorkerInfo]:
        """Every worker of a role."""
        return [info for infos in self.ask_all(deployment, "worker_infos") for info in infos]

    def num_running(self) -> int:
        """Sequences that some decode worker computes."""
        return sum(audit.stats.num_running for audit in self.audits("Decode"))

    def is_idle(self) -> bool:
        """True when no worker holds a sequence, a page or a lease."""
        audits = self.audits("Prefill") + self.audits("Decode")
        return all(
            a.stats.free_pages == a.stats.num_pages and a.num_leases == 0 and a.stats.num_running == 0 for a in audits
        )

    def complete(self, prompt: str, **options: object) -> httpx.Response:
        """POST /v1/completions."""
        body = {"model": MODEL, "prompt": prompt, **options}
        return httpx.post(f"{self.base_url}/v1/completions", json=body, timeout=WAIT_LIMIT_S)

    def open_connection(self, *, stream: bool, max_tokens: int) -> socket.socket:
        """A connection with an unfinished completion on it; closing it is a client that leaves."""
        body = {
            "model": MODEL,
            "prompt": "go on",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.base_url}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection = socket.create_connection((HOST, self.port))
        connection.sendall(head.encode() + content)
        return connection


@contextmanager
def local_cluster(checkpoint_dir: Path) -> Iterator[LocalCluster]:
    """Start Ray and the graph; on exit nothing of them is left."""
    environment = dict(os.environ)
    ray_dir = tempfile.mkdtemp(prefix="dsv4t.", dir="/tmp")  # short: Unix socket names must stay below 108 bytes
    prepare_single_machine(ray_temp_dir=ray_dir)
    try:
        port = free_port()
        path = Path(ray_dir) / "serve.yaml"
        path.write_text(yaml.safe_dump(serve_config(checkpoint_dir, port)))
        raw, config = load_serve_file(path)
        ray.init(
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            namespace="serve",
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
        assert deploy(path, raw, config, threading.Event())
        cluster = LocalCluster(f"http://{HOST}:{port}", port, config)
        wait_until(lambda: httpx.get(f"{cluster.base_url}/ready", timeout=WAIT_LIMIT_S).status_code == 200)
        yield cluster
    finally:
        if ray.is_initialized():  # otherwise serve.shutdown would start a cluster in order to end it
            serve.shutdown()
            ray.shutdown()
        os.environ.clear()
        os.environ.update(environment)
        shutil.rmtree(ray_dir, ignore_errors=True)


def serve_config(checkpoint_dir: Path, port: int) -> dict[str, Any]:
    """A Serve config file: two routers, one prefill and one decode replica, small caches."""
    role = {
        "engine": {"max_num_seqs": 16, "max_num_batched_tokens": 256, "dtype": "float32"},
        "kv": {"num_pages": 32},
    }
    args = {
        "model": {"path": str(checkpoint_dir), "served_names": [MODEL]},
        "prefill": role,
        "decode": role,
        "router": {
            "num_replicas": 2,
            "max_ongoing_requests": 64,
            "batches": {"dir": str(checkpoint_dir.parent / "batches")},
        },
    }
    return {
        "http_options": {"host": HOST, "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [{"name": APP, "route_prefix": "/", "import_path": BUILDER, "args": args}],
    }


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
