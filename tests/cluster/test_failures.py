"""Processes that die are noticed and replaced, and the next request works."""

import os
import signal
import time

import httpx
import pytest

from tests.kit.clock import wait_until
from tests.kit.cluster import LocalCluster

pytestmark = pytest.mark.ray


def replaced(cluster: LocalCluster, deployment: str, pid: int) -> bool:
    """True when another worker has taken the place of process `pid`."""
    try:
        workers = cluster.workers(deployment)
    except Exception:  # the replica may be going at this moment; the caller asks again
        return False
    return bool(workers) and all(worker.pid != pid for worker in workers)


@pytest.mark.parametrize("deployment", ["Prefill", "Decode"])
def test_a_worker_killed_while_idle_is_replaced_without_a_request(cluster, deployment):
    (worker,) = cluster.workers(deployment)

    os.kill(worker.pid, signal.SIGKILL)

    wait_until(lambda: replaced(cluster, deployment, worker.pid), limit_s=40)
    assert cluster.complete("after", max_tokens=4, temperature=0).status_code == 200


@pytest.mark.parametrize("deployment", ["Prefill", "Decode"])
def test_the_next_request_after_a_kill_waits_for_the_replacement(cluster, deployment):
    before = cluster.complete("the same", max_tokens=8, temperature=0)
    (worker,) = cluster.workers(deployment)

    os.kill(worker.pid, signal.SIGKILL)
    after = cluster.complete("the same", max_tokens=8, temperature=0)

    assert after.status_code == 200, after.text
    assert after.json()["choices"] == before.json()["choices"]


def test_a_stream_on_a_dying_worker_ends_with_an_error_at_once(cluster):
    (worker,) = cluster.workers("Decode")
    body = {"model": "toy", "prompt": "go on", "max_tokens": 4000, "temperature": 0, "stream": True}

    with httpx.stream("POST", f"{cluster.base_url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        started = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        last = [line for line in lines if line][-1]

    assert time.monotonic() - started < 5
    assert "worker_lost" in last
    wait_until(lambda: replaced(cluster, "Decode", worker.pid), limit_s=40)


def test_a_dead_router_is_replaced_and_its_requests_are_dropped(cluster):
    routers = {facts.pid for facts in cluster.ask_all("Router", "process_facts")}
    body = {"model": "toy", "prompt": "go on", "max_tokens": 4000, "temperature": 0, "stream": True}

    with httpx.stream("POST", f"{cluster.base_url}/v1/completions", json=body, timeout=30):
        wait_until(lambda: cluster.num_running() == 1)
        for pid in routers:
            os.kill(pid, signal.SIGKILL)
        wait_until(cluster.is_idle, limit_s=5)

    wait_until(lambda: httpx.get(f"{cluster.base_url}/ready", timeout=30).status_code == 200, limit_s=40)
    assert cluster.complete("after", max_tokens=2).status_code == 200
