"""Transport inside one process: the same staging, leases and checks, and no peer."""

import uuid
from collections.abc import Sequence

import torch

from dsv4_cluster.clock import Clock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.lease import TicketClaim
from dsv4_cluster.transfer.manifest import check_ticket, unpack_payload
from dsv4_cluster.transfer.publisher import Publisher


class LocalTransport:
    """One object serves both sides; a ticket of another one is unknown to it."""

    def __init__(self, config: TransferConfig, clock: Clock) -> None:
        endpoint = f"local://{uuid.uuid4().hex}"
        self._publisher = Publisher(config, clock, backend="local", endpoints=lambda _buffer: (endpoint,))

    @property
    def num_staged_bytes(self) -> int:
        return self._publisher.num_staged_bytes

    @property
    def num_leases(self) -> int:
        return len(self._publisher.leases)

    def publish(
        self, *, request_id: str, epoch: int, layout_id: str, num_tokens: int, segments: Sequence[LiveSegment]
    ) -> KVTicket:
        return self._publisher.publish(
            request_id=request_id, epoch=epoch, layout_id=layout_id, num_tokens=num_tokens, segments=segments
        )

    def fetch(self, ticket: KVTicket, *, request_id: str, epoch: int, layout_id: str) -> list[LiveSegment]:
        check_ticket(ticket, request_id=request_id, epoch=epoch, layout_id=layout_id)
        with self._publisher.leases.reading(TicketClaim(ticket.ticket_id, request_id, epoch, layout_id)) as buffer:
            payload = torch.empty(buffer.num_bytes, dtype=torch.uint8)
            buffer.read_into(payload.numpy().data)
        return unpack_payload(ticket, payload)

    def release(self, ticket: KVTicket) -> None:
        self._publisher.leases.release(ticket.ticket_id)

    def sweep(self) -> int:
        return self._publisher.leases.sweep()

    def close(self) -> None:
        self._publisher.leases.close()
