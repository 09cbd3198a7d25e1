"""The shared-memory backend: it maps where it may, and uses the same ticket's gRPC endpoint where it may not."""

import logging
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.errors import LeaseExpiredError
from dsv4_cluster.transfer.factory import create_transport
from dsv4_cluster.transfer.staging import memfd_name
from tests.kit.transfer_peer import Recipe, make_segments

RECIPES = (Recipe("window", 9000, 1), Recipe("state", 777, 2))


@pytest.fixture
def shm(pair_of):
    pair = pair_of("shm")
    yield pair
    pair.publisher.advance(10.0)
    pair.publisher.sweep()


def fetch(receiver, ticket):
    return receiver.fetch(ticket, request_id="req", epoch=1, layout_id="layout")


def assert_equal_data(segments, recipes=RECIPES):
    for found, expected in zip(segments, make_segments(recipes), strict=True):
        assert torch.equal(found.data, expected.data)


def num_mapped(*tickets) -> int:
    """Mappings of these tickets' payloads in this process."""
    maps = Path("/proc/self/maps").read_text()
    return sum(maps.count(memfd_name(ticket.endpoints[0].rpartition("/")[2])) for ticket in tickets)


def with_shm_endpoint(ticket, **parts):
    """The ticket with parts of its endpoint shm://host/pid/fd/token replaced."""
    host, pid, fd, token = ticket.endpoints[0].removeprefix("shm://").split("/")
    found = {"host": host, "pid": pid, "fd": fd, "token": token} | parts
    return replace(ticket, endpoints=("shm://" + "/".join(found.values()), *ticket.endpoints[1:]))


def test_the_payload_is_mapped_as_long_as_a_segment_lives(shm):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)
    segments = fetch(shm.receiver, ticket)
    last = segments[-1].data
    num_while_held = num_mapped(ticket)

    del segments
    num_while_one_is_held = num_mapped(ticket)
    del last

    assert (num_while_held, num_while_one_is_held, num_mapped(ticket)) == (1, 1, 0)


@pytest.mark.parametrize("pid", ["own", "dead", "not a number"])
def test_a_process_that_cannot_be_opened_falls_back_to_grpc(shm, pid, caplog):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)
    if pid == "dead":
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            pid = str(process.pid)
    elif pid == "own":
        pid = "1"  # init never holds this memfd; without privileges its descriptors may not even be read

    with caplog.at_level(logging.INFO, "dsv4_cluster.transfer.shm"):
        segments = fetch(shm.receiver, with_shm_endpoint(ticket, pid=pid))

    assert_equal_data(segments)
    assert num_mapped(ticket) == 0
    assert "falling back to gRPC" in caplog.text


def test_a_reused_descriptor_number_is_noticed(shm):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)
    other = shm.publisher.publish("req", 1, "layout", (Recipe("window", 9000, 3), Recipe("state", 777, 4)))
    fd_of_other = other.endpoints[0].split("/")[-2]

    segments = fetch(shm.receiver, with_shm_endpoint(ticket, fd=fd_of_other))

    assert_equal_data(segments)
    assert num_mapped(ticket, other) == 0


def test_a_descriptor_of_another_kind_is_not_opened(shm):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)

    assert_equal_data(fetch(shm.receiver, with_shm_endpoint(ticket, fd="0")))


def test_another_host_or_pid_namespace_falls_back_to_grpc(shm):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)
    boot_id, _, pid_namespace = ticket.endpoints[0].removeprefix("shm://").split("/")[0].partition(".")

    for host in (f"{boot_id}.{int(pid_namespace) + 1}", f"00000000-{boot_id[9:]}.{pid_namespace}"):
        segments = fetch(shm.receiver, with_shm_endpoint(ticket, host=host))
        assert_equal_data(segments)
        assert num_mapped(ticket) == 0


def test_a_malformed_or_missing_shm_endpoint_falls_back_to_grpc(shm):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)

    for first in ((), ("shm://",), ("shm://nonsense",), (ticket.endpoints[0].rpartition("/")[0],)):
        assert_equal_data(fetch(shm.receiver, replace(ticket, endpoints=(*first, ticket.endpoints[1]))))


def test_the_fallback_refuses_an_expired_lease_too(shm):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)
    shm.publisher.advance(10.0)

    with pytest.raises(LeaseExpiredError):
        fetch(shm.receiver, with_shm_endpoint(ticket, host="other"))


def test_a_grpc_receiver_understands_the_same_ticket(shm):
    ticket = shm.publisher.publish("req", 1, "layout", RECIPES)

    with closing(create_transport(TransferConfig(backend="grpc"), clock=MonotonicClock())) as receiver:
        assert_equal_data(fetch(receiver, ticket))
        receiver.release(ticket)

    assert shm.publisher.state().num_leases == 0
