"""One local cluster for the whole session. Every test gets it idle and must leave it idle."""

from collections.abc import Iterator

import pytest

from dsv4_cluster.offline import LLM
from tests.kit.clock import wait_until
from tests.kit.cluster import LocalCluster, local_cluster


@pytest.fixture(scope="session")
def _running_cluster(toy_dir) -> Iterator[LocalCluster]:
    with local_cluster(toy_dir) as cluster:
        yield cluster


@pytest.fixture
def cluster(_running_cluster) -> Iterator[LocalCluster]:
    """The session's cluster, with nothing running and every page and lease accounted for, before and after."""
    wait_until(_running_cluster.is_idle)
    yield _running_cluster
    wait_until(_running_cluster.is_idle)


@pytest.fixture(scope="session")
def offline_llm(toy_dir) -> LLM:
    """The same checkpoint in this process."""
    return LLM(toy_dir, dtype="float32")
