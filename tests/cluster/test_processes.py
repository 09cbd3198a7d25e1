"""What runs where: routers without torch, both of them served, and nothing that cannot be placed."""

from pathlib import Path

import pytest

from dsv4_cluster.errors import ConfigError
from dsv4_cluster.serve.app import build
from tests.kit.cluster import NUM_CPUS

pytestmark = pytest.mark.ray


def test_live_routers_have_no_torch(cluster):
    assert cluster.complete("warm up", max_tokens=4).status_code == 200

    facts = cluster.ask_all("Router", "process_facts")

    assert len(facts) == 2
    for router in facts:
        assert "ray" in router.modules  # the question is answered truthfully
        assert not router.modules & {"torch", "dsv4_kernels", "transformers"}


@pytest.mark.parametrize("deployment", ["Prefill", "Decode"])
def test_only_the_worker_process_has_torch_not_its_replica(cluster, deployment):
    (worker,) = cluster.workers(deployment)
    (replica,) = cluster.ask_all(deployment, "process_facts")

    assert "libtorch" in Path(f"/proc/{worker.pid}/maps").read_text()
    assert worker.pid != replica.pid
    assert "torch" not in replica.modules


def test_a_graph_that_does_not_fit_is_refused_with_the_sum(cluster):
    config = cluster.config
    role = config.decode.model_copy(update={"num_replicas": 3, "worker_num_cpus": 1.5})

    terms = r"router 2 x \(0\.1\) \+ prefill 1 x \(0\.1 \+ 0\.1\) \+ decode 3 x \(0\.1 \+ 1\.5\)"
    with pytest.raises(ConfigError, match=rf"needs 5\.2 CPUs = {terms}, the cluster has {NUM_CPUS}"):
        build(config.model_copy(update={"decode": role}))
