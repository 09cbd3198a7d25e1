"""Segments <-> one payload: the order of the bytes, and the checks that stand before anyone may use them."""

from collections.abc import Sequence

import msgpack
import torch

from dsv4_cluster.errors import LayoutMismatchError, SegmentCorruptError, StaleEpochError
from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.handoff import KVSegment, KVTicket
from dsv4_cluster.transfer.checksum import bound_checksum


def describe_segments(segments: Sequence[LiveSegment], *, request_id: str, epoch: int) -> tuple[KVSegment, ...]:
    """Describe what `publish` is about to stage, checksums included.

    segments: data [num_bytes] uint8 on the CPU, contiguous.
    Raises: ValueError when a segment's data is anything else.
    """
    return tuple(_describe(segment, request_id, epoch, idx) for idx, segment in enumerate(segments))


def check_ticket(ticket: KVTicket, *, request_id: str, epoch: int, layout_id: str) -> None:
    """Refuse a ticket that is not for this attempt of this request and this cache.

    Raises: StaleEpochError, LayoutMismatchError.
    """
    if ticket.request_id != request_id:
        raise StaleEpochError(f"ticket {ticket.ticket_id} belongs to request {ticket.request_id!r}, not {request_id!r}")
    if ticket.epoch != epoch:
        raise StaleEpochError(f"{request_id}: ticket is of epoch {ticket.epoch}, expected epoch {epoch}")
    if ticket.layout_id != layout_id:
        raise LayoutMismatchError(f"{request_id}: ticket has layout_id {ticket.layout_id!r}, expected {layout_id!r}")


def endpoint_of(ticket: KVTicket, scheme: str) -> str | None:
    """Return the ticket's first endpoint that starts with `scheme` (such as ``grpc://``); None = there is none."""
    return next((endpoint for endpoint in ticket.endpoints if endpoint.startswith(scheme)), None)


def unpack_payload(ticket: KVTicket, payload: torch.Tensor) -> list[LiveSegment]:
    """Verify every segment of a received payload, then return them as views of it.

    payload: [ticket.num_bytes] uint8 on the CPU, contiguous. Segments lie back to back, so a view starts at any byte.
    Raises: SegmentCorruptError for a wrong payload length or a segment whose checksum differs.
    """
    if payload.numel() != ticket.num_bytes:
        raise SegmentCorruptError(
            f"{ticket.request_id}: payload has {payload.numel()} bytes, the ticket says {ticket.num_bytes}"
        )
    segments: list[LiveSegment] = []
    offset = 0
    for idx, described in enumerate(ticket.segments):
        data = payload[offset : offset + described.num_bytes]
        offset += described.num_bytes
        segment = LiveSegment(
            pool=described.pool,
            layer_start=described.layer_start,
            layer_end=described.layer_end,
            num_rows=described.num_rows,
            data=data,
        )
        found = bound_checksum(data, _binding(segment, ticket.request_id, ticket.epoch, idx))
        if found != described.checksum:
            raise SegmentCorruptError(
                f"{ticket.request_id}: segment {idx} ({described.pool}, layers {described.layer_start}.."
                f"{described.layer_end}) has checksum {found:#018x}, the ticket says {described.checksum:#018x}"
            )
        segments.append(segment)
    return segments


def _describe(segment: LiveSegment, request_id: str, epoch: int, idx: int) -> KVSegment:
    data = segment.data
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.device.type != "cpu":
        raise ValueError(
            f"{request_id}: segment {idx} ({segment.pool}) must be contiguous 1-D uint8 on the CPU, "
            f"got {data.dtype} {tuple(data.shape)} on {data.device}"
        )
    return KVSegment(
        pool=segment.pool,
        layer_start=segment.layer_start,
        layer_end=segment.layer_end,
        num_rows=segment.num_rows,
        num_bytes=data.numel(),
        checksum=bound_checksum(data, _binding(segment, request_id, epoch, idx)),
    )


def _binding(segment: LiveSegment, request_id: str, epoch: int, idx: int) -> bytes:
    """Who the bytes belong to and which rows they are; msgpack delimits every field."""
    fields = (request_id, epoch, idx, segment.pool, segment.layer_start, segment.layer_end, segment.num_rows)
    return msgpack.packb((*fields, segment.data.numel()))
