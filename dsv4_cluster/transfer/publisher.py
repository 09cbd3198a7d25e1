"""The publishing side that all backends share: segments into staging, a lease and a ticket out."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from dsv4_cluster.clock import Clock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.lease import LeaseTable
from dsv4_cluster.transfer.manifest import describe_segments
from dsv4_cluster.transfer.staging import StagingBuffer, StagingPool


class Publisher:
    """Staging and leases of one transport. Thread-safe.

    backend: name written into tickets. endpoints: where peers find a buffer, preferred first.
    leases: where tickets are entered, and where the serving side of a backend looks claims up.
    """

    def __init__(
        self,
        config: TransferConfig,
        clock: Clock,
        leases: LeaseTable,
        *,
        backend: str,
        endpoints: Callable[[StagingBuffer], tuple[str, ...]],
    ) -> None:
        self._leases = leases
        self._backend = backend
        self._endpoints = endpoints
        self._clock = clock
        self._lease_s = config.lease_s
        self._pool = StagingPool(config.max_staged_bytes)

    @property
    def num_staged_bytes(self) -> int:
        """Bytes of all buffers that a lease or a read holds."""
        return self._pool.num_bytes

    def publish(
        self, *, request_id: str, epoch: int, layout_id: str, num_tokens: int, segments: Sequence[LiveSegment]
    ) -> KVTicket:
        """Stage the segments and lease them; expired leases are swept first.

        segments: data [num_bytes] uint8, any device.
        Raises: OverloadedError, PromptTooLongError, KVTransferError; nothing stays staged then.
        """
        self._leases.sweep()
        segments = [replace(segment, data=segment.data.contiguous().cpu()) for segment in segments]
        # Described before staging: a byte that goes wrong on the way into staging does not verify either.
        described = describe_segments(segments, request_id=request_id, epoch=epoch)
        buffer = self._pool.allocate(sum(segment.num_bytes for segment in described))
        try:
            _fill(buffer, segments)
            ticket = KVTicket(
                ticket_id=uuid.uuid4().hex,
                request_id=request_id,
                epoch=epoch,
                backend=self._backend,
                endpoints=self._endpoints(buffer),
                layout_id=layout_id,
                num_tokens=num_tokens,
                segments=described,
                expires_at_s=self._clock.now_s() + self._lease_s,
            )
            self._leases.add(ticket, buffer)
        except BaseException:
            buffer.drop()
            raise
        return ticket


def _fill(buffer: StagingBuffer, segments: Sequence[LiveSegment]) -> None:
    offset = 0
    for segment in segments:
        buffer.write(offset, segment.data.numpy().data)
        offset += segment.data.numel()
