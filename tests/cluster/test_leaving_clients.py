"""A client that leaves frees what it held within a second."""

import pytest

from tests.kit.clock import wait_until

pytestmark = pytest.mark.ray

MOST_TOKENS = 4000  # minutes of work, unless somebody stops it


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_closed_connection_frees_the_pages_within_a_second(cluster, stream):
    connection = cluster.open_connection(stream=stream, max_tokens=MOST_TOKENS)
    wait_until(lambda: cluster.num_running() == 1)

    connection.close()

    wait_until(cluster.is_idle, limit_s=1.0)


def test_many_leaving_clients_leave_nothing_behind(cluster):
    connections = [cluster.open_connection(stream=bool(index % 2), max_tokens=MOST_TOKENS) for index in range(12)]
    wait_until(lambda: cluster.num_running() > 0)

    for connection in connections:
        connection.close()

    wait_until(cluster.is_idle, limit_s=5.0)
