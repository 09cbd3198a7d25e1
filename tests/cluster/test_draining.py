"""Replicas that leave finish what they have and then go, although routers hold calls to them open."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import yaml
from ray.exceptions import RayActorError

from dsv4_cluster.config.load import load_serve_file
from dsv4_cluster.serve.runner import deploy
from dsv4_cluster.worker.gang import worker_name
from tests.kit.clock import wait_until
from tests.kit.cluster import LocalCluster, serve_config

pytestmark = pytest.mark.ray

NUM_STREAMS = 8
NUM_TOKENS = 150
NUM_LEAVING = 6
MOST_TOKENS = 6000  # minutes of work, unless somebody stops it


def scale_decode(cluster: LocalCluster, tmp_path: Path, num_replicas: int) -> None:
    """Deploy the same graph with another number of decode replicas, as an operator would."""
    raw = serve_config(Path(cluster.config.model.path), cluster.port)
    raw["applications"][0]["deployments"] = [{"name": "Decode", "num_replicas": num_replicas}]
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(raw))
    raw, config = load_serve_file(path)
    assert deploy(path, raw, config, threading.Event())
    wait_until(lambda: len(cluster.workers("Decode")) == num_replicas)


def reaches_every_worker(cluster: LocalCluster) -> bool:
    """Ask once more. Returns: True when every decode worker has computed something, so the routers know them all."""
    assert cluster.complete("hello", max_tokens=2).status_code == 200
    return all(audit.stats.num_steps for audit in cluster.audits("Decode"))


def test_a_decode_replica_that_leaves_finishes_its_answers_and_goes(cluster, tmp_path):
    router_pids = {facts.pid for facts in cluster.ask_all("Router", "process_facts")}
    scale_decode(cluster, tmp_path, 2)
    pids = {worker.pid for worker in cluster.workers("Decode")}
    wait_until(lambda: reaches_every_worker(cluster))

    def ask(seed: int):
        return cluster.complete("a long way", max_tokens=NUM_TOKENS, seed=seed)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [pool.submit(ask, seed) for seed in range(NUM_STREAMS)]
        wait_until(lambda: all(audit.stats.num_running for audit in cluster.audits("Decode")))
        scale_decode(cluster, tmp_path, 1)
        finished = [answer.result() for answer in answers]

    assert [answer.status_code for answer in finished] == [200] * NUM_STREAMS
    assert {answer.json()["choices"][0]["finish_reason"] for answer in finished} <= {"length", "stop"}
    (stays,) = {worker.pid for worker in cluster.workers("Decode")}
    (leaves,) = pids - {stays}
    wait_until(lambda: not Path(f"/proc/{leaves}").exists(), limit_s=10)
    assert {facts.pid for facts in cluster.ask_all("Router", "process_facts")} == router_pids  # nothing else restarted


def test_clients_that_leave_a_draining_replica_free_their_places(cluster, tmp_path):
    """Serve sends no calls to a replica that drains; aborts have to reach it all the same."""
    scale_decode(cluster, tmp_path, 2)
    wait_until(lambda: reaches_every_worker(cluster))
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(cluster.open_connection(stream=True, max_tokens=MOST_TOKENS))
            for _ in range(NUM_LEAVING)
        ]
        wait_until(lambda: cluster.num_running() == NUM_LEAVING)
        replica_ids = {snapshot.replica_id for snapshot in cluster.ask_all("Decode", "snapshot", "test")}
        leaders = {one: ray.get_actor(worker_name("decode", one, 0), namespace="serve") for one in replica_ids}

        def num_running() -> int:
            running = 0
            for leader in leaders.values():
                with contextlib.suppress(RayActorError):  # the one that leaves goes when nothing runs there
                    running += ray.get(leader.stats.remote()).num_running
            return running

        scaling = pool.submit(scale_decode, cluster, tmp_path, 1)  # ends when the replica is gone
        wait_until(lambda: len(cluster.workers("Decode")) == 1)
        assert num_running() == NUM_LEAVING
        for num_left in range(NUM_LEAVING - 1, -1, -1):
            connections[num_left].close()
            wait_until(lambda num_left=num_left: num_running() == num_left, limit_s=5)
        scaling.result()
