"""A publisher that dies by SIGKILL: its peers get typed errors at once, and the kernel frees its memory."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.errors import KVTransferError
from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.base import KVTransport
from dsv4_cluster.transfer.factory import create_transport
from tests.kit.transfer_peer import ProcessPeer, Recipe, make_segments

RECIPES = (Recipe("window", 300_000, 1), Recipe("state", 5000, 2))
FETCH_TIMEOUT_S = 60.0  # far above what any of these tests waits
AT_ONCE_S = 10.0  # generous for a busy machine, and far below the timeout


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What is left after the publisher was killed in the middle of a fetch."""

    receiver: KVTransport
    ticket: KVTicket
    segments: list[LiveSegment]  # fetched while it lived
    error: BaseException | None  # of the fetch in progress
    error_after_s: float
    shared_files: set[str]  # in shared memory, and not there before the publisher started


@pytest.fixture(scope="module")
def aftermath_of():
    with ThreadPoolExecutor(1) as threads:
        opened = []

        @lru_cache(None)
        def get(backend: str) -> Aftermath:
            config = TransferConfig(backend=backend, fetch_timeout_s=FETCH_TIMEOUT_S)
            receiver = create_transport(config, clock=MonotonicClock())
            opened.append(receiver)
            return kill_during_a_fetch(config, receiver, threads)

        yield get
        for receiver in opened:
            receiver.close()


@pytest.fixture(params=["shm", "grpc"])
def aftermath(request, aftermath_of) -> Aftermath:
    return aftermath_of(request.param)


def kill_during_a_fetch(config, receiver, threads) -> Aftermath:
    before = set(os.listdir("/dev/shm"))
    with closing(ProcessPeer(config)) as peer:
        ticket = peer.publish("req", 1, "layout", RECIPES)
        segments = fetch(receiver, ticket)
        peer.pause()
        in_progress = threads.submit(fetch, receiver, ticket)
        peer.kill()
        killed_s = time.monotonic()
        error = in_progress.exception(FETCH_TIMEOUT_S)
        after_s = time.monotonic() - killed_s
        return Aftermath(receiver, ticket, segments, error, after_s, set(os.listdir("/dev/shm")) - before)


def fetch(receiver, ticket):
    return receiver.fetch(ticket, request_id="req", epoch=1, layout_id="layout")


def test_a_fetch_in_progress_fails_at_once(aftermath):
    assert isinstance(aftermath.error, KVTransferError) and aftermath.error.retryable
    assert aftermath.error_after_s < AT_ONCE_S


def test_a_later_fetch_fails_at_once(aftermath):
    started_s = time.monotonic()

    with pytest.raises(KVTransferError) as caught:
        fetch(aftermath.receiver, aftermath.ticket)

    assert caught.value.retryable
    assert time.monotonic() - started_s < AT_ONCE_S


def test_releasing_its_ticket_is_silent(aftermath):
    aftermath.receiver.release(aftermath.ticket)


def test_bytes_fetched_before_stay_intact(aftermath):
    for found, expected in zip(aftermath.segments, make_segments(RECIPES), strict=True):
        assert torch.equal(found.data, expected.data)


def test_no_file_is_left_in_shared_memory(aftermath):
    assert not [name for name in aftermath.shared_files if "dsv4" in name]
