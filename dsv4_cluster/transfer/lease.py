"""Who may fetch which payload until when: leases over staging buffers, on an injected clock."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dsv4_cluster.clock import Clock
from dsv4_cluster.errors import KVTransferError, LeaseExpiredError
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.manifest import check_ticket
from dsv4_cluster.transfer.staging import StagingBuffer


@dataclass(frozen=True, slots=True)
class TicketClaim:
    """What a fetching side says about the ticket it holds."""

    ticket_id: str
    request_id: str
    epoch: int
    layout_id: str


@dataclass(frozen=True, slots=True)
class _Lease:
    ticket: KVTicket
    buffer: StagingBuffer


class LeaseTable:
    """Leases by ticket id. Each one holds its buffer once and drops it exactly once. Thread-safe.

    | state of a lease   | found by a claim | holds its buffer |
    |--------------------|------------------|------------------|
    | live               | yes              | yes              |
    | past expires_at_s  | no               | until swept      |
    | released or swept  | no               | no               |
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._leases)

    def add(self, ticket: KVTicket, buffer: StagingBuffer) -> None:
        """Take over the creator's hold on `buffer`.

        Raises: KVTransferError when closed; the hold stays with the caller then.
        """
        with self._lock:
            if self._is_closed:
                raise KVTransferError(f"{ticket.request_id}: the transport is closed")
            self._leases[ticket.ticket_id] = _Lease(ticket, buffer)

    def check(self, claim: TicketClaim) -> None:
        """Raises: LeaseExpiredError, StaleEpochError, LayoutMismatchError as `reading` does."""
        with self._lock:
            self._find(claim)

    @contextmanager
    def reading(self, claim: TicketClaim) -> Iterator[StagingBuffer]:
        """Hold the buffer of a live lease for the time of a read, whatever happens to the lease meanwhile.

        Raises: LeaseExpiredError (expired, released or unknown), StaleEpochError, LayoutMismatchError.
        """
        with self._lock:
            buffer = self._find(claim).buffer
            buffer.hold()
        try:
            yield buffer
        finally:
            buffer.drop()

    def release(self, ticket_id: str) -> bool:
        """End a lease. Returns: False when there is none (any more)."""
        with self._lock:
            lease = self._leases.pop(ticket_id, None)
        if lease is None:
            return False
        lease.buffer.drop()
        return True

    def sweep(self) -> int:
        """Drop expired leases. Returns: how many."""
        now_s = self._clock.now_s()
        with self._lock:
            expired = [key for key, lease in self._leases.items() if lease.ticket.expires_at_s <= now_s]
            leases = [self._leases.pop(key) for key in expired]
        for lease in leases:
            lease.buffer.drop()
        return len(leases)

    def close(self) -> None:
        """End every lease and refuse further ones."""
        with self._lock:
            self._is_closed = True
            leases = list(self._leases.values())
            self._leases.clear()
        for lease in leases:
            lease.buffer.drop()

    def _find(self, claim: TicketClaim) -> _Lease:
        lease = self._leases.get(claim.ticket_id)
        if lease is None:
            raise LeaseExpiredError(f"{claim.request_id}: ticket {claim.ticket_id} is unknown, released or swept")
        check_ticket(lease.ticket, request_id=claim.request_id, epoch=claim.epoch, layout_id=claim.layout_id)
        overdue_s = self._clock.now_s() - lease.ticket.expires_at_s
        if overdue_s >= 0:
            raise LeaseExpiredError(
                f"{claim.request_id}: the lease of ticket {claim.ticket_id} ended {overdue_s:.3f} s ago"
            )
        return lease
