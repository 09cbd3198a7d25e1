"""The transport that workers hold: publishing is the same for every backend, a `PeerLink` is what differs."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dsv4_cluster.clock import Clock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.lease import LeaseTable
from dsv4_cluster.transfer.manifest import check_ticket, unpack_payload
from dsv4_cluster.transfer.publisher import Publisher
from dsv4_cluster.transfer.staging import StagingBuffer


class PeerLink(Protocol):
    """How the payloads of one transport reach its peers, and theirs reach it. Thread-safe."""

    def endpoints(self, buffer: StagingBuffer) -> tuple[str, ...]:
        """Where peers find a buffer, preferred first."""
        ...

    def read(self, ticket: KVTicket) -> torch.Tensor:
        """Return the payload, not yet verified: [num_bytes] uint8 on the CPU. Raises: as `KVTransport.fetch`."""
        ...

    def release(self, ticket: KVTicket) -> None:
        """End the lease, here or at the peer that published it; see `KVTransport.release`."""
        ...

    def close(self) -> None:
        """Stop serving and end calls in progress; idempotent."""
        ...


class StagedTransport:
    """A `KVTransport`: staging, leases and checks around a link.

    backend: name written into tickets. connect: builds the link over the leases that it serves to peers.
    """

    def __init__(
        self, config: TransferConfig, clock: Clock, *, backend: str, connect: Callable[[LeaseTable], PeerLink]
    ) -> None:
        leases = LeaseTable(clock)
        self._link = connect(leases)
        self._publisher = Publisher(config, clock, leases, backend=backend, endpoints=self._link.endpoints)
        self._leases = leases

    @property
    def num_staged_bytes(self) -> int:
        return self._publisher.num_staged_bytes

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def publish(
        self, *, request_id: str, epoch: int, layout_id: str, num_tokens: int, segments: Sequence[LiveSegment]
    ) -> KVTicket:
        return self._publisher.publish(
            request_id=request_id, epoch=epoch, layout_id=layout_id, num_tokens=num_tokens, segments=segments
        )

    def fetch(self, ticket: KVTicket, *, request_id: str, epoch: int, layout_id: str) -> list[LiveSegment]:
        check_ticket(ticket, request_id=request_id, epoch=epoch, layout_id=layout_id)
        return unpack_payload(ticket, self._link.read(ticket))

    def release(self, ticket: KVTicket) -> None:
        self._link.release(ticket)

    def sweep(self) -> int:
        return self._leases.sweep()

    def close(self) -> None:
        self._link.close()
        self._leases.close()
