"""A publisher for the transfer tests: in this process, or in a process of its own that is driven over a pipe."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.errors import Dsv4Error
from dsv4_cluster.kv.snapshot import LiveSegment
from dsv4_cluster.protocol.handoff import KVTicket
from dsv4_cluster.transfer.base import KVTransport
from dsv4_cluster.transfer.factory import create_transport

REPLY_TIMEOUT_S = 60.0
ROW_BYTES = 4


class Recipe(NamedTuple):
    """A segment that both processes can make, so that no tensor goes through the pipe."""

    pool: str
    num_bytes: int
    seed: int


class PeerState(NamedTuple):
    """What a publisher holds at one moment."""

    num_leases: int
    num_staged_bytes: int
    num_memfds: int
    num_fds: int
    num_threads: int


def make_segments(recipes: Sequence[Recipe]) -> list[LiveSegment]:
    """Segments of seeded random bytes, one layer each."""
    return [
        LiveSegment(
            pool=recipe.pool,
            layer_start=layer,
            layer_end=layer + 1,
            num_rows=recipe.num_bytes // ROW_BYTES,
            data=torch.randint(
                0, 256, (recipe.num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(recipe.seed)
            ),
        )
        for layer, recipe in enumerate(recipes)
    ]


class LocalPeer:
    """A publisher on a manual clock in this process."""

    def __init__(self, config: TransferConfig) -> None:
        self.clock = ManualClock()
        self.transport: KVTransport = create_transport(config, clock=self.clock)

    def publish(self, request_id: str, epoch: int, layout_id: str, recipes: Sequence[Recipe]) -> KVTicket:
        segments = make_segments(recipes)
        return self.transport.publish(
            request_id=request_id, epoch=epoch, layout_id=layout_id, num_tokens=7, segments=segments
        )

    def release(self, ticket: KVTicket) -> None:
        self.transport.release(ticket)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def sweep(self) -> int:
        return self.transport.sweep()

    def flip_staged_bit(self, offset: int) -> None:
        """Change one staged byte of the only payload, as a stray write in the publisher would."""
        (fd,) = memfds()
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 0x10]), offset)

    def state(self) -> PeerState:
        return PeerState(
            num_leases=self.transport.num_leases,
            num_staged_bytes=self.transport.num_staged_bytes,
            num_memfds=len(memfds()),
            num_fds=len(os.listdir("/proc/self/fd")),
            num_threads=threading.active_count(),
        )

    def reopen(self, config: TransferConfig, times: int) -> PeerState:
        """Open, use and close another transport `times` times. Returns: what this process holds afterwards."""
        for _ in range(times):
            with closing(create_transport(config, clock=ManualClock())) as other:
                ticket = other.publish(request_id="r", epoch=0, layout_id="l", num_tokens=1, segments=())
                other.fetch(ticket, request_id="r", epoch=0, layout_id="l")
        return self.state()

    def close(self) -> None:
        self.transport.close()


class ProcessPeer:
    """The same commands, carried out by a `LocalPeer` in a child process."""

    def __init__(self, config: TransferConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config), daemon=True)
        self._process.start()
        theirs.close()
        self._reply()

    @property
    def pid(self) -> int:
        return self._process.pid

    def publish(self, request_id: str, epoch: int, layout_id: str, recipes: Sequence[Recipe]) -> KVTicket:
        return self._call("publish", request_id, epoch, layout_id, tuple(recipes))

    def release(self, ticket: KVTicket) -> None:
        self._call("release", ticket)

    def advance(self, seconds: float) -> None:
        self._call("advance", seconds)

    def sweep(self) -> int:
        return self._call("sweep")

    def flip_staged_bit(self, offset: int) -> None:
        self._call("flip_staged_bit", offset)

    def state(self) -> PeerState:
        return self._call("state")

    def reopen(self, config: TransferConfig, times: int) -> PeerState:
        return self._call("reopen", config, times)

    def pause(self) -> None:
        """SIGSTOP: alive, with its sockets open, and silent."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(REPLY_TIMEOUT_S)

    def close(self) -> None:
        """End the child; after `kill` this only frees what is left here."""
        if self._process.is_alive():
            self._call("close")
            self._pipe.send(None)
        self._process.join(REPLY_TIMEOUT_S)
        assert self._process.exitcode is not None
        self._process.close()
        self._pipe.close()

    def _call(self, method: str, *args: object) -> object:
        self._pipe.send((method, args))
        return self._reply()

    def _reply(self) -> object:
        assert self._pipe.poll(REPLY_TIMEOUT_S), "the publisher does not answer"
        reply = self._pipe.recv()
        if isinstance(reply, Dsv4Error):
            raise reply
        return reply


def wait_until(claim: Callable[[], bool]) -> None:
    """Poll until `claim()` is true, for what another process or thread does in its own time."""
    deadline_s = time.monotonic() + REPLY_TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline_s, "it never became true"
        time.sleep(0.005)


def reset_peak_rss(pid: int) -> int:
    """Let the kernel measure the peak of a process anew. Returns: its resident bytes at this moment."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_bytes(pid, "VmRSS")


def peak_rss(pid: int) -> int:
    """Largest number of resident bytes of a process since `reset_peak_rss`."""
    return _status_bytes(pid, "VmHWM")


def memfds() -> list[int]:
    """Descriptors of this process that are staging buffers."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith("/memfd:dsv4-kv-"):
            found.append(int(name))
    return found


def _status_bytes(pid: int, field: str) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024  # the kernel's unit is KiB


def _serve(pipe: Connection, config: TransferConfig) -> None:
    torch.set_num_threads(1)
    peer = LocalPeer(config)
    pipe.send(None)
    while (command := pipe.recv()) is not None:
        method, args = command
        try:
            pipe.send(getattr(peer, method)(*args))
        except Dsv4Error as err:
            pipe.send(err)
