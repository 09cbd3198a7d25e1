"""The seam between workers and the ways KV bytes can travel."""

from collections.abc import Sequence
from typing import Protocol

from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.handoff import KVTicket


class KVTransport(Protocol):
    """Both ends of a transfer: publish and lease on one side, fetch and verify on the other.

    Synchronous and thread-safe; called from worker threads, never from an event loop. Every failure is a
    `KVTransferError` or a subclass, so that the caller can recompute the request.
    """

    @property
    def num_staged_bytes(self) -> int:
        """Bytes held for published payloads, fetches in progress included."""
        ...

    @property
    def num_leases(self) -> int:
        """Published payloads that are neither released nor swept."""
        ...

    def publish(
        self, *, request_id: str, epoch: int, layout_id: str, num_tokens: int, segments: Sequence[LiveSegment]
    ) -> KVTicket:
        """Copy the segments into staging under a new lease; the tensors may be reused on return.

        segments: data [num_bytes] uint8, any device.
        Raises: OverloadedError when `max_staged_bytes` would be exceeded, PromptTooLongError when this payload alone
            does; KVTransferError when closed.
        """
        ...

    def fetch(self, ticket: KVTicket, *, request_id: str, epoch: int, layout_id: str) -> list[LiveSegment]:
        """Return the published segments, all of them verified, or raise; the lease stays until `release`.

        Returns: segments in the ticket's order, data [num_bytes] uint8 on the CPU; they own their memory, independent
            of the lease, of the publisher's life and of this transport.
        Raises: StaleEpochError (other request or attempt), LayoutMismatchError, LeaseExpiredError (expired, released
            or unknown ticket), SegmentCorruptError (length or checksum), KVTransferError (unreachable, timeout).
        """
        ...

    def release(self, ticket: KVTicket) -> None:
        """End the lease, from either side, once or several times.

        Best effort and silent: an unknown ticket is ignored, and the lease at an unreachable publisher expires by
        itself. A fetch in progress still completes.
        """
        ...

    def sweep(self) -> int:
        """Drop expired leases. Returns: how many."""
        ...

    def close(self) -> None:
        """Stop serving and free everything; idempotent. Calls in progress end with a typed error."""
        ...
