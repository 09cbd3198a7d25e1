"""A client that leaves frees what it held within a second."""

import json
import socket

import pytest

from tests.kit.clock import wait_until
from tests.kit.cluster import MODEL, LocalCluster

pytestmark = pytest.mark.ray

MOST_TOKENS = 4000  # minutes of work, unless somebody stops it


def send(cluster: LocalCluster, *, stream: bool) -> socket.socket:
    """A connection with an unfinished request on it."""
    body = {"model": MODEL, "prompt": "go on", "max_tokens": MOST_TOKENS, "seed": 5, "temperature": 0, "stream": stream}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {cluster.base_url}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", cluster.port))
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_closed_connection_frees_the_pages_within_a_second(cluster, stream):
    connection = send(cluster, stream=stream)
    wait_until(lambda: cluster.num_running() == 1)

    connection.close()

    wait_until(cluster.is_idle, limit_s=1.0)


def test_many_leaving_clients_leave_nothing_behind(cluster):
    connections = [send(cluster, stream=bool(index % 2)) for index in range(12)]
    wait_until(lambda: cluster.num_running() > 0)

    for connection in connections:
        connection.close()

    wait_until(cluster.is_idle, limit_s=5.0)
