"""Link inside one host: the peer maps the publisher's memfd; leases are checked over the gRPC control channel.

An endpoint names the kernel, the pid namespace, the process, its descriptor and the memfd's random token:
``shm://<boot id>.<pid namespace>/<pid>/<fd>/<token>``. Wherever such a descriptor cannot be opened, the same ticket's
gRPC endpoint is used.
"""

import logging
import mmap
import os
from pathlib import Path

import torch

from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.errors import SegmentCorruptError
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.grpc import GrpcLink
from dsv4_cluster.transfer.lease import LeaseTable
from dsv4_cluster.transfer.manifest import endpoint_of
from dsv4_cluster.transfer.staging import StagingBuffer, memfd_name

logger = logging.getLogger(__name__)

SHM_SCHEME = "shm://"


class ShmLink:
    """Serves memfds that peers of this host open through /proc, with gRPC for control and as fallback."""

    def __init__(self, leases: LeaseTable, config: TransferConfig, *, advertise_host: str | None = None) -> None:
        self._host_id = _host_id()
        self._grpc = GrpcLink(leases, config, advertise_host=advertise_host)

    def endpoints(self, buffer: StagingBuffer) -> tuple[str, ...]:
        if self._host_id is None:
            return self._grpc.endpoints(buffer)
        memfd = f"{SHM_SCHEME}{self._host_id}/{os.getpid()}/{buffer.fd}/{buffer.token}"
        return (memfd, *self._grpc.endpoints(buffer))

    def read(self, ticket: KVTicket) -> torch.Tensor:
        payload = self._open(ticket)
        return self._grpc.read(ticket) if payload is None else payload

    def release(self, ticket: KVTicket) -> None:
        self._grpc.release(ticket)

    def close(self) -> None:
        self._grpc.close()

    def _open(self, ticket: KVTicket) -> torch.Tensor | None:
        """Map the payload after the publisher confirmed the lease; None = not reachable this way."""
        endpoint = endpoint_of(ticket, SHM_SCHEME)
        host_id, _, address = (endpoint or "").removeprefix(SHM_SCHEME).partition("/")
        if not address or host_id != self._host_id:
            return None
        self._grpc.check(ticket)
        try:
            fd = _open_memfd(address)
        except (OSError, ValueError) as err:
            logger.info("%s: %s is refused (%s), falling back to gRPC", ticket.request_id, endpoint, err)
            return None
        try:
            return _map(fd, ticket)
        finally:
            os.close(fd)


def _open_memfd(address: str) -> int:
    """Open ``<pid>/<fd>/<token>``. Raises: OSError when refused or gone, ValueError when it is not that memfd."""
    pid, fd, token = address.split("/")
    path = f"/proc/{int(pid)}/fd/{int(fd)}"
    expected = f"/memfd:{memfd_name(token)} (deleted)"
    # Compared before, because opening some other kind of file may block or have effects; and after, because pid and
    # descriptor may be reused in between.
    _check_link(path, expected)
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_link(f"/proc/self/fd/{opened}", expected)
    except (OSError, ValueError):
        os.close(opened)
        raise
    return opened


def _check_link(path: str, expected: str) -> None:
    found = os.readlink(path)
    if found != expected:
        raise ValueError(f"{path} is {found!r}, not {expected!r}")


def _map(fd: int, ticket: KVTicket) -> torch.Tensor:
    """Return a tensor over a private mapping of the payload.

    The mapping lives as long as any view of the tensor and keeps the pages alive without the publisher; it is
    copy-on-write, so writing to a view is safe and stays private. The publisher never writes to a published memfd and
    its size is sealed, so what is verified is what is used.
    """
    num_bytes = os.fstat(fd).st_size
    if num_bytes != ticket.num_bytes:
        raise SegmentCorruptError(
            f"{ticket.request_id}: the publisher has {num_bytes} bytes, the ticket says {ticket.num_bytes}"
        )
    if num_bytes == 0:  # an empty mapping is not possible
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _host_id() -> str | None:
    """Identify kernel and pid namespace, within which a pid means one process; None = /proc does not tell."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
