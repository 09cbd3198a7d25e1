"""Link between hosts: a payload as a stream of chunks, and lease control, over plain gRPC.

Methods carry bytes: a msgpack claim in, and for `Fetch` one msgpack header and then raw chunks out. Memory stays
bounded on both sides: the sender reads one chunk at a time from staging and waits for flow control, the receiver writes
chunks straight into the tensor it returns. The channel is neither encrypted nor authenticated: it belongs on a private
network, where the random ticket id is the only capability.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import msgpack
import torch

from dsv4_cluster.config.transfer_config import MAX_CHUNK_BYTES, TransferConfig
from dsv4_cluster.errors import (
    ConfigError,
    KVTransferError,
    LayoutMismatchError,
    LeaseExpiredError,
    SegmentCorruptError,
    StaleEpochError,
)
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.lease import LeaseTable, TicketClaim
from dsv4_cluster.transfer.manifest import endpoint_of
from dsv4_cluster.transfer.staging import StagingBuffer

logger = logging.getLogger(__name__)

GRPC_SCHEME = "grpc://"
_SERVICE = "dsv4.KVTransfer"
_NUM_SERVER_THREADS = 16  # fetches served at a time; more of them wait, which costs latency only
_CONTROL_TIMEOUT_S = 5.0  # lease control moves a few hundred bytes
_CLOSE_GRACE_S = 1.0
_MAX_CONTROL_BYTES = 64 << 10
_MESSAGE_SLACK_BYTES = 4096  # framing around a chunk
_MAX_CHANNELS = 256  # peers kept connected; replaced workers leave idle channels behind
_MAX_DETAIL_CHARS = 1000  # status details travel in a header of limited size

# gRPC itself never produces these codes, so each one means exactly one error of ours.
_CODE_OF_ERROR: tuple[tuple[type[KVTransferError], grpc.StatusCode], ...] = (
    (LeaseExpiredError, grpc.StatusCode.NOT_FOUND),
    (StaleEpochError, grpc.StatusCode.FAILED_PRECONDITION),
    (LayoutMismatchError, grpc.StatusCode.INVALID_ARGUMENT),
    (SegmentCorruptError, grpc.StatusCode.DATA_LOSS),
    (KVTransferError, grpc.StatusCode.ABORTED),
)


class GrpcLink:
    """Serves through its own server and reads from the peers' servers."""

    def __init__(self, leases: LeaseTable, config: TransferConfig, *, advertise_host: str | None = None) -> None:
        self._leases = leases
        self._server = _GrpcServer(leases, config, advertise_host=advertise_host)
        self._client = _GrpcClient(config)

    def endpoints(self, _buffer: StagingBuffer) -> tuple[str, ...]:
        return (self._server.endpoint,)

    def read(self, ticket: KVTicket) -> torch.Tensor:
        return self._client.fetch(ticket)

    def check(self, ticket: KVTicket) -> None:
        """Ask the publisher whether the lease stands. Raises: as `KVTransport.fetch`."""
        self._client.check(ticket)

    def release(self, ticket: KVTicket) -> None:
        if self._server.endpoint in ticket.endpoints:
            self._leases.release(ticket.ticket_id)
        else:
            self._client.release(ticket)

    def close(self) -> None:
        self._client.close()
        self._server.close()


class _GrpcServer:
    """Serves the payloads of a lease table and lets peers check and release leases.

    advertise_host: this node's address, for tickets of a server that listens on all addresses.
    endpoint: address for tickets; the port is chosen by the operating system.
    """

    def __init__(self, leases: LeaseTable, config: TransferConfig, *, advertise_host: str | None = None) -> None:
        self._leases = leases
        self._chunk_bytes = config.chunk_bytes
        host = _advertised_host(config, advertise_host)
        self._threads = ThreadPoolExecutor(_NUM_SERVER_THREADS, thread_name_prefix="kv-transfer")
        options = (
            ("grpc.max_receive_message_length", _MAX_CONTROL_BYTES),
            ("grpc.max_send_message_length", config.chunk_bytes + _MESSAGE_SLACK_BYTES),
            ("grpc.so_reuseport", 0),  # two workers must never share a port
        )
        self._server = grpc.server(self._threads, options=options)
        handlers = {
            "Fetch": grpc.unary_stream_rpc_method_handler(self._serve_fetch),
            "Check": grpc.unary_unary_rpc_method_handler(self._serve_check),
            "Release": grpc.unary_unary_rpc_method_handler(self._serve_release),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            port = self._server.add_insecure_port(_join(config.bind_host, 0))
        except RuntimeError as err:
            self._threads.shutdown()
            raise ConfigError(f"transfer.bind_host={config.bind_host!r} cannot be listened on: {err}") from err
        self.endpoint = GRPC_SCHEME + _join(host, port)
        self._server.start()

    def close(self) -> None:
        """Refuse new calls, give those in progress a moment, cancel the rest, wait for the threads; idempotent."""
        self._server.stop(grace=_CLOSE_GRACE_S).wait()
        self._threads.shutdown(wait=True)

    def _serve_fetch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with self._leases.reading(_decode_claim(request)) as buffer:
                yield msgpack.packb(buffer.num_bytes)
                for offset in range(0, buffer.num_bytes, self._chunk_bytes):
                    yield buffer.read(offset, min(self._chunk_bytes, buffer.num_bytes - offset))
        except KVTransferError as err:
            _abort(context, err)

    def _serve_check(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            self._leases.check(_decode_claim(request))
        except KVTransferError as err:
            _abort(context, err)
        return b""

    def _serve_release(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        self._leases.release(request.decode("ascii", errors="replace"))
        return b""


class _GrpcClient:
    """Calls the servers of peers; channels are kept open between calls. Thread-safe."""

    def __init__(self, config: TransferConfig) -> None:
        self._fetch_timeout_s = config.fetch_timeout_s
        self._control_timeout_s = min(_CONTROL_TIMEOUT_S, config.fetch_timeout_s)
        self._channels: OrderedDict[str, grpc.Channel] = OrderedDict()  # least recently used first
        self._is_closed = False
        self._lock = threading.Lock()

    def fetch(self, ticket: KVTicket) -> torch.Tensor:
        """Return the unverified payload, [ticket.num_bytes] uint8. Raises: KVTransferError and its subclasses."""
        with self._calling(ticket) as channel:
            call = _invoke(channel.unary_stream(f"/{_SERVICE}/Fetch"), _encode_claim(ticket), self._fetch_timeout_s)
            try:
                return _receive(call, ticket)
            finally:
                call.cancel()

    def check(self, ticket: KVTicket) -> None:
        """Ask the publisher whether the lease is live. Raises: KVTransferError and its subclasses."""
        with self._calling(ticket) as channel:
            _invoke(channel.unary_unary(f"/{_SERVICE}/Check"), _encode_claim(ticket), self._control_timeout_s)

    def release(self, ticket: KVTicket) -> None:
        """End the lease at the publisher, best effort."""
        try:
            with self._calling(ticket) as channel:
                method = channel.unary_unary(f"/{_SERVICE}/Release")
                _invoke(method, ticket.ticket_id.encode(), self._control_timeout_s)
        except KVTransferError as err:
            logger.debug("%s: lease left to expire: %s", ticket.request_id, err)

    def close(self) -> None:
        """Close all channels; calls in progress fail."""
        with self._lock:
            self._is_closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    @contextmanager
    def _calling(self, ticket: KVTicket) -> Iterator[grpc.Channel]:
        """Lend the channel to the ticket's publisher and turn what the call raises into typed errors."""
        endpoint = endpoint_of(ticket, GRPC_SCHEME)
        if endpoint is None:
            raise KVTransferError(f"{ticket.request_id}: no {GRPC_SCHEME} endpoint among {ticket.endpoints}")
        channel = self._channel(endpoint)
        try:
            yield channel
        except grpc.RpcError as err:
            if err.code() is grpc.StatusCode.UNAVAILABLE:
                self._forget(endpoint, channel)
            raise _typed_error(err, endpoint, ticket) from err

    def _channel(self, endpoint: str) -> grpc.Channel:
        with self._lock:
            if self._is_closed:
                raise KVTransferError("the transport is closed")
            channel = self._channels.get(endpoint)
            if channel is None:
                channel = grpc.insecure_channel(endpoint.removeprefix(GRPC_SCHEME), options=_CHANNEL_OPTIONS)
                self._channels[endpoint] = channel
            self._channels.move_to_end(endpoint)
            surplus = [self._channels.popitem(last=False)[1]] if len(self._channels) > _MAX_CHANNELS else []
        for oldest in surplus:
            oldest.close()
        return channel

    def _forget(self, endpoint: str, channel: grpc.Channel) -> None:
        """Drop the channel to a dead peer, so that the next call dials anew instead of waiting in its back-off."""
        with self._lock:
            if endpoint in self._channels and self._channels[endpoint] is channel:
                del self._channels[endpoint]
        channel.close()


_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_CONTROL_BYTES),
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES + _MESSAGE_SLACK_BYTES),
    ("grpc.enable_http_proxy", 0),  # cache bytes never go through a web proxy of the environment
    ("grpc.use_local_subchannel_pool", 1),  # a forgotten channel takes its connection back-off with it
)


def _invoke(method: Callable[..., Any], request: bytes, timeout_s: float) -> Any:
    try:
        return method(request, timeout=timeout_s)
    except ValueError as err:  # how gRPC reports a channel that `close` closed under the call
        raise KVTransferError(f"the transport is closed: {err}") from err


def _receive(call: Iterator[bytes], ticket: KVTicket) -> torch.Tensor:
    """Assemble a `Fetch` stream. Memory is allocated only after publisher and ticket agree about the size."""
    num_bytes = _decode_header(next(call, b""))
    if num_bytes != ticket.num_bytes:
        raise SegmentCorruptError(
            f"{ticket.request_id}: the publisher has {num_bytes} bytes, the ticket says {ticket.num_bytes}"
        )
    payload = torch.empty(ticket.num_bytes, dtype=torch.uint8)
    target = payload.numpy().data
    for chunk in call:
        if len(chunk) > len(target):
            raise SegmentCorruptError(f"{ticket.request_id}: the stream is longer than {ticket.num_bytes} bytes")
        target[: len(chunk)] = chunk
        target = target[len(chunk) :]
    if target:
        raise SegmentCorruptError(f"{ticket.request_id}: the stream lacks {len(target)} of {ticket.num_bytes} bytes")
    return payload


def _decode_header(message: bytes) -> int:
    try:
        return int(msgpack.unpackb(message))
    except (ValueError, TypeError, msgpack.UnpackException) as err:
        raise SegmentCorruptError(f"malformed header of {len(message)} bytes: {err}") from err


def _encode_claim(ticket: KVTicket) -> bytes:
    return msgpack.packb((ticket.ticket_id, ticket.request_id, ticket.epoch, ticket.layout_id))


def _decode_claim(request: bytes) -> TicketClaim:
    try:
        ticket_id, request_id, epoch, layout_id = msgpack.unpackb(request)
    except (ValueError, TypeError, msgpack.UnpackException) as err:
        raise KVTransferError(f"malformed claim of {len(request)} bytes: {err}") from err
    return TicketClaim(str(ticket_id), str(request_id), int(epoch), str(layout_id))


def _abort(context: grpc.ServicerContext, err: KVTransferError) -> None:
    code = next(code for error, code in _CODE_OF_ERROR if isinstance(err, error))
    context.abort(code, err.message[:_MAX_DETAIL_CHARS])


def _typed_error(err: grpc.RpcError, endpoint: str, ticket: KVTicket) -> KVTransferError:
    for error, code in _CODE_OF_ERROR:
        if err.code() is code:
            return error(str(err.details()))
    return KVTransferError(f"{ticket.request_id}: {endpoint}: {err.code().name}: {err.details()}")


def _advertised_host(config: TransferConfig, node_host: str | None) -> str:
    if config.advertise_host is not None:
        return config.advertise_host
    if config.bind_host not in ("0.0.0.0", "::"):
        return config.bind_host
    if node_host is None:
        raise ConfigError(
            f"transfer.bind_host={config.bind_host!r} listens everywhere, so transfer.advertise_host must name "
            "the address that peers use"
        )
    return node_host


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
