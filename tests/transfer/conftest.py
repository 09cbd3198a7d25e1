"""One publisher and one receiver per backend; for shm and grpc the publisher is another process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache

import pytest

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.transfer.base import KVTransport
from dsv4_cluster.transfer.factory import create_transport
from tests.kit.transfer_peer import LocalPeer, ProcessPeer, wait_until

LEASE_S = 10.0
MAX_STAGED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ends of one backend."""

    backend: str
    publisher: LocalPeer | ProcessPeer
    receiver: KVTransport


@pytest.fixture(scope="session")
def pair_of() -> Iterator[Callable[[str], Pair]]:
    """pair_of(backend) -> the session's pair. Not parametrised: random order would start processes over and over."""
    with ExitStack() as stack:
        yield lru_cache(None)(lambda backend: _make_pair(backend, stack))


def _make_pair(backend: str, stack: ExitStack) -> Pair:
    config = TransferConfig(
        backend=backend, lease_s=LEASE_S, chunk_bytes=4096, max_staged_bytes=MAX_STAGED_BYTES, fetch_timeout_s=20
    )
    if backend == "local":
        local = stack.enter_context(closing(LocalPeer(config)))
        return Pair(backend, local, local.transport)
    peer = stack.enter_context(closing(ProcessPeer(config)))
    receiver = stack.enter_context(closing(create_transport(config, clock=MonotonicClock())))
    return Pair(backend, peer, receiver)


@pytest.fixture(params=["local", "shm", "grpc"])
def pair(request, pair_of) -> Iterator[Pair]:
    """A backend's two ends, with nothing published before and nothing left after."""
    session_pair = pair_of(request.param)
    yield session_pair
    session_pair.publisher.advance(LEASE_S)
    session_pair.publisher.sweep()
    wait_until(
        lambda: session_pair.publisher.state().num_staged_bytes == 0
    )  # cancelled streams end on their own thread
    state = session_pair.publisher.state()
    assert (state.num_leases, state.num_memfds) == (0, 0)
