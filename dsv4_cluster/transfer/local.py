"""Link inside one process: the same staging, leases and checks, and no peer."""

import uuid

import torch

from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.lease import LeaseTable, TicketClaim
from dsv4_cluster.transfer.staging import StagingBuffer


class LocalLink:
    """One object serves both sides; a ticket of another one is unknown to it."""

    def __init__(self, leases: LeaseTable) -> None:
        self._leases = leases
        self._endpoint = f"local://{uuid.uuid4().hex}"

    def endpoints(self, _buffer: StagingBuffer) -> tuple[str, ...]:
        return (self._endpoint,)

    def read(self, ticket: KVTicket) -> torch.Tensor:
        claim = TicketClaim(ticket.ticket_id, ticket.request_id, ticket.epoch, ticket.layout_id)
        with self._leases.reading(claim) as buffer:
            payload = torch.empty(buffer.num_bytes, dtype=torch.uint8)
            buffer.read_into(payload.numpy().data)
        return payload

    def release(self, ticket: KVTicket) -> None:
        self._leases.release(ticket.ticket_id)

    def close(self) -> None:
        """Nothing is open but the leases, which the transport closes."""
