"""Closing a transport: typed errors from then on, and nothing left in the process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.errors import KVTransferError
from dsv4_cluster.transfer.factory import create_transport
from tests.kit.transfer_peer import ProcessPeer, Recipe, make_segments, wait_until

BACKENDS = ["local", "shm", "grpc"]
RECIPES = (Recipe("compressed", 4 << 20, 1),)


def publish(transport):
    segments = make_segments(RECIPES)
    return transport.publish(request_id="req", epoch=1, layout_id="layout", num_tokens=1, segments=segments)


def fetch(transport, ticket):
    return transport.fetch(ticket, request_id="req", epoch=1, layout_id="layout")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_transport_refuses_with_typed_errors_and_holds_nothing(backend):
    transport = create_transport(TransferConfig(backend=backend), clock=ManualClock())
    ticket = publish(transport)

    transport.close()
    transport.close()

    with pytest.raises(KVTransferError):
        publish(transport)
    with pytest.raises(KVTransferError):
        fetch(transport, ticket)
    transport.release(ticket)
    assert (transport.num_leases, transport.num_staged_bytes, transport.sweep()) == (0, 0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closing_during_fetches_gives_the_whole_payload_or_a_typed_error(backend):
    transport = create_transport(TransferConfig(backend=backend, chunk_bytes=4096), clock=ManualClock())
    ticket = publish(transport)
    has_fetched = threading.Event()
    expected = make_segments(RECIPES)[0].data

    def fetch_until_refused() -> None:
        with pytest.raises(KVTransferError):
            while True:
                assert torch.equal(fetch(transport, ticket)[0].data, expected)
                has_fetched.set()

    with ThreadPoolExecutor(3) as threads:
        fetches = [threads.submit(fetch_until_refused) for _ in range(3)]
        has_ever_fetched = has_fetched.wait(20)
        transport.close()
        for future in fetches:
            future.result(20)

    assert has_ever_fetched
    assert transport.num_staged_bytes == 0


@pytest.fixture(scope="module")
def quiet_process():
    """A process in which nobody else opens or closes anything."""
    with closing(ProcessPeer(TransferConfig(backend="local"))) as peer:
        yield peer


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_descriptor_and_no_thread_stays(quiet_process, backend):
    config = TransferConfig(backend=backend)
    first = quiet_process.reopen(config, 1)  # the libraries open what they keep for the life of the process

    quiet_process.reopen(config, 10)

    def is_as_before() -> bool:  # sockets and the server's grace timer end in gRPC's own time
        state = quiet_process.state()
        return state.num_fds <= first.num_fds and state.num_threads == 1

    wait_until(is_as_before)
    assert quiet_process.state().num_memfds == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_publish_leaves_nothing_staged(backend):
    segments = make_segments(RECIPES * 2)
    config = TransferConfig(backend=backend, max_staged_bytes=5 << 20)
    with closing(create_transport(config, clock=ManualClock())) as transport:
        with pytest.raises(Exception, match="max_staged_bytes"):
            transport.publish(request_id="req", epoch=1, layout_id="layout", num_tokens=1, segments=segments)

        assert (transport.num_leases, transport.num_staged_bytes) == (0, 0)
        assert torch.equal(fetch(transport, publish(transport))[0].data, segments[0].data)
