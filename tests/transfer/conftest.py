"""One publisher and one receiver per backend; for shm and grpc the publisher is another process."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.transfer.base import KVTransport
from dsv4_cluster.transfer.factory import create_transport
from tests.kit.transfer_peer import LocalPeer, ProcessPeer

LEASE_S = 10.0
MAX_STAGED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends of one backend."""

    backend: str
    publisher: LocalPeer | ProcessPeer
    receiver: KVTransport


@pytest.fixture(scope="session", params=["local", "shm", "grpc"])
def session_pair(request) -> Iterator[Pair]:
    config = TransferConfig(
        backend=request.param, lease_s=LEASE_S, chunk_bytes=4096, max_staged_bytes=MAX_STAGED_BYTES, fetch_timeout_s=20
    )
    if request.param == "local":
        peer = LocalPeer(config)
        yield Pair(request.param, peer, peer.transport)
        peer.close()
        return
    peer = ProcessPeer(config)
    receiver = create_transport(config, clock=MonotonicClock())
    yield Pair(request.param, peer, receiver)
    receiver.close()
    peer.close()


@pytest.fixture
def pair(session_pair) -> Iterator[Pair]:
    """The backend's two ends, with nothing published before and nothing left after."""
    yield session_pair
    session_pair.publisher.advance(LEASE_S)
    session_pair.publisher.sweep()
    state = session_pair.publisher.state()
    assert (state.num_leases, state.num_staged_bytes, state.num_memfds) == (0, 0, 0)
