"""Leases and staging buffers: who holds memory, and that it is given back exactly once."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.errors import KVTransferError, LeaseExpiredError, OverloadedError
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.lease import LeaseTable, TicketClaim
from dsv4_cluster.transfer.staging import StagingPool


def make_ticket(ticket_id="t", expires_at_s=5.0) -> KVTicket:
    return KVTicket(
        ticket_id=ticket_id,
        request_id="r",
        epoch=1,
        backend="local",
        endpoints=(),
        layout_id="l",
        num_tokens=1,
        segments=(),
        expires_at_s=expires_at_s,
    )


CLAIM = TicketClaim("t", "r", 1, "l")


def test_a_read_keeps_the_bytes_after_the_release():
    pool, table = StagingPool(100), LeaseTable(ManualClock())
    buffer = pool.allocate(10)
    buffer.write(0, memoryview(b"0123456789"))
    table.add(make_ticket(), buffer)

    with table.reading(CLAIM) as held:
        assert table.release("t")
        found, staged_while_read = held.read(2, 3), pool.num_bytes

    assert (found, staged_while_read, pool.num_bytes) == (b"234", 10, 0)


def test_a_failing_read_gives_its_hold_back():
    pool, table = StagingPool(100), LeaseTable(ManualClock())
    table.add(make_ticket(), pool.allocate(10))

    with pytest.raises(KeyError), table.reading(CLAIM):
        raise KeyError

    table.release("t")
    assert pool.num_bytes == 0


def test_release_and_sweep_race_to_free_exactly_once():
    clock, pool = ManualClock(), StagingPool(1 << 20)
    table = LeaseTable(clock)
    for idx in range(200):
        table.add(make_ticket(str(idx)), pool.allocate(10))
    clock.advance(5.0)
    start = threading.Barrier(5)

    def release_all() -> int:
        start.wait()
        return sum(table.release(str(idx)) for idx in range(200))

    def sweep_all() -> int:
        start.wait()
        return table.sweep()

    with ThreadPoolExecutor(5) as threads:
        futures = [threads.submit(work) for work in (release_all, release_all, sweep_all, release_all, sweep_all)]

    assert sum(future.result() for future in futures) == 200
    assert (len(table), pool.num_bytes) == (0, 0)


def test_an_expired_lease_is_not_found_though_its_bytes_are_still_staged():
    clock, pool = ManualClock(), StagingPool(100)
    table = LeaseTable(clock)
    table.add(make_ticket(), pool.allocate(10))
    clock.advance(6.5)

    with pytest.raises(LeaseExpiredError, match=r"1\.500 s ago"):
        table.check(CLAIM)

    assert pool.num_bytes == 10
    table.close()
    assert pool.num_bytes == 0


def test_a_closed_table_takes_no_lease_and_leaves_the_hold_to_the_caller():
    pool, table = StagingPool(100), LeaseTable(ManualClock())
    buffer = pool.allocate(10)
    table.close()

    with pytest.raises(KVTransferError, match="closed"):
        table.add(make_ticket(), buffer)

    buffer.drop()
    assert pool.num_bytes == 0


def test_the_pool_is_exact_up_to_its_limit():
    pool = StagingPool(10)
    first = pool.allocate(10)

    with pytest.raises(OverloadedError):
        pool.allocate(1)
    pool.allocate(0).drop()
    first.drop()

    pool.allocate(10).drop()
    assert pool.num_bytes == 0


def test_the_size_of_a_buffer_is_sealed():
    buffer = StagingPool(100).allocate(10)

    for num_bytes in (9, 11):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fd, num_bytes)

    buffer.drop()
