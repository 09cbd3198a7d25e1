"""The gRPC backend: bounded memory, deadlines, and addresses."""

import os
import socket
import time
from contextlib import closing
from dataclasses import replace

import grpc
import msgpack
import pytest
import torch

from dsv4_cluster.clock import ManualClock, MonotonicClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.errors import ConfigError, KVTransferError
from dsv4_cluster.transfer.factory import create_transport
from tests.kit.transfer_peer import Recipe, make_segments, peak_rss, reset_peak_rss, wait_until

SMALL = (Recipe("window", 9000, 1),)
LARGE = (Recipe("compressed", 32 << 20, 1),)  # far above the flow-control windows
SLACK_BYTES = 16 << 20  # flow-control windows, message buffers and the allocator


@pytest.fixture
def remote(pair_of):
    pair = pair_of("grpc")
    yield pair
    pair.publisher.advance(10.0)
    pair.publisher.sweep()


def fetch(receiver, ticket):
    return receiver.fetch(ticket, request_id="req", epoch=1, layout_id="layout")


def test_memory_is_bounded_on_both_sides(remote):
    ticket = remote.publisher.publish("req", 1, "layout", LARGE)
    sender_before, receiver_before = reset_peak_rss(remote.publisher.pid), reset_peak_rss(os.getpid())

    fetch(remote.receiver, ticket)

    assert peak_rss(remote.publisher.pid) - sender_before < SLACK_BYTES
    assert peak_rss(os.getpid()) - receiver_before < ticket.num_bytes + SLACK_BYTES


def test_a_released_payload_is_freed_when_its_last_stream_is_cancelled(remote):
    ticket = remote.publisher.publish("req", 1, "layout", LARGE)
    claim = msgpack.packb((ticket.ticket_id, "req", 1, "layout"))
    with grpc.insecure_channel(ticket.endpoints[0].removeprefix("grpc://")) as channel:
        call = channel.unary_stream("/dsv4.KVTransfer/Fetch")(claim, timeout=60)
        next(call)

        remote.publisher.release(ticket)
        held = remote.publisher.state()
        call.cancel()

        assert (held.num_leases, held.num_staged_bytes) == (0, ticket.num_bytes)
        wait_until(lambda: remote.publisher.state().num_staged_bytes == 0)
    assert remote.publisher.state().num_memfds == 0


def test_a_malformed_claim_is_an_error_and_the_server_goes_on(remote):
    ticket = remote.publisher.publish("req", 1, "layout", SMALL)
    with grpc.insecure_channel(ticket.endpoints[0].removeprefix("grpc://")) as channel:
        for claim in (b"", b"\xc1", msgpack.packb(7), msgpack.packb(("a", "b", "c")), msgpack.packb((1, 2, "x", 4))):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary("/dsv4.KVTransfer/Check")(claim, timeout=20)

    assert torch.equal(fetch(remote.receiver, ticket)[0].data, make_segments(SMALL)[0].data)


@pytest.mark.parametrize("backend", ["shm", "grpc"])
def test_a_silent_peer_times_out(remote, backend):
    ticket = remote.publisher.publish("req", 1, "layout", SMALL)
    config = TransferConfig(backend=backend, fetch_timeout_s=0.2)
    with (
        closing(create_transport(config, clock=MonotonicClock())) as receiver,
        closing(socket.create_server(("127.0.0.1", 0))) as silent,
    ):
        endpoint = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        started_s = time.monotonic()

        with pytest.raises(KVTransferError) as caught:
            fetch(receiver, replace(ticket, endpoints=(endpoint,)))

    assert caught.value.retryable
    assert time.monotonic() - started_s < 10  # far above the 0.2 s, far below what gRPC waits by itself


def test_a_closed_port_is_refused_at_once(remote):
    ticket = remote.publisher.publish("req", 1, "layout", SMALL)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        endpoint = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
    started_s = time.monotonic()

    with pytest.raises(KVTransferError, match="UNAVAILABLE"):
        fetch(remote.receiver, replace(ticket, endpoints=(endpoint,)))

    assert time.monotonic() - started_s < 10  # of fetch_timeout_s = 20


def test_a_ticket_without_an_endpoint_for_this_backend_is_refused(remote):
    ticket = remote.publisher.publish("req", 1, "layout", SMALL)

    with pytest.raises(KVTransferError, match="no grpc:// endpoint"):
        fetch(remote.receiver, replace(ticket, endpoints=("local://x",)))


def test_a_server_on_all_addresses_needs_an_address_to_advertise():
    config = TransferConfig(backend="grpc", bind_host="0.0.0.0")

    with pytest.raises(ConfigError, match="advertise_host"):
        create_transport(config, clock=ManualClock())


@pytest.mark.parametrize(
    ("settings", "node_host", "expected"),
    [
        ({}, "10.0.0.1", "127.0.0.1"),
        ({"bind_host": "0.0.0.0"}, "10.0.0.1", "10.0.0.1"),
        ({"bind_host": "0.0.0.0", "advertise_host": "node.example"}, "10.0.0.1", "node.example"),
    ],
)
def test_tickets_name_the_configured_then_the_bound_then_the_node_address(settings, node_host, expected):
    config = TransferConfig(backend="grpc", **settings)

    with closing(create_transport(config, clock=ManualClock(), advertise_host=node_host)) as transport:
        ticket = transport.publish(request_id="r", epoch=0, layout_id="l", num_tokens=1, segments=())

    assert ticket.endpoints[0].startswith(f"grpc://{expected}:")


def test_an_address_of_another_machine_cannot_be_listened_on():
    config = TransferConfig(backend="grpc", bind_host="192.0.2.1")  # reserved for documentation, on no interface

    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        create_transport(config, clock=ManualClock())
