"""Memory that published payloads wait in: anonymous files of the kernel, bounded in total.

A memfd has no name in any file system. Another process of the host can open it through /proc, and the kernel frees it
with its last holder, even when the owner dies by SIGKILL. It is filled and read by system calls, not mapped, so that it
costs the owner no page faults and a late reader can never meet unmapped memory.
"""

import fcntl
import os
import secrets
import threading
from collections.abc import Callable

from dsv4_cluster.errors import KVTransferError, OverloadedError, PromptTooLongError

# The size of a buffer is final, so that a peer's mapping of it cannot fault (SIGBUS).
_SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class StagingPool:
    """Hands out staging buffers up to a total number of bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers that still have a holder."""
        with self._lock:
            return self._num_bytes

    def allocate(self, num_bytes: int) -> "StagingBuffer":
        """Return a new buffer with one holder.

        Raises: OverloadedError when the total would exceed the limit; PromptTooLongError when this payload alone does,
        so that waiting cannot help; KVTransferError when the kernel refuses.
        """
        if num_bytes > self._max_bytes:
            raise PromptTooLongError(
                f"a payload of {num_bytes} bytes is larger than transfer.max_staged_bytes={self._max_bytes}"
            )
        with self._lock:
            if self._num_bytes + num_bytes > self._max_bytes:
                raise OverloadedError(
                    f"payload of {num_bytes} bytes does not fit into transfer.max_staged_bytes={self._max_bytes} "
                    f"with {self._num_bytes} bytes staged"
                )
            self._num_bytes += num_bytes
        try:
            return StagingBuffer(num_bytes, self._give_back)
        except OSError as err:
            self._give_back(num_bytes)
            raise KVTransferError(f"cannot stage {num_bytes} bytes: {err}") from err

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes


class StagingBuffer:
    """One payload in a memfd; closed by its last holder. Written once, by its creator, before anyone else sees it.

    fd: descriptor in this process. token: unguessable part of the memfd's name, which a peer compares, so that a
    reused pid or descriptor number is noticed. num_bytes: payload size.
    """

    def __init__(self, num_bytes: int, on_free: Callable[[int], None]) -> None:
        self.num_bytes = num_bytes
        self.token = secrets.token_hex(16)
        self._on_free = on_free
        self._num_holders = 1
        self._lock = threading.Lock()
        self.fd = os.memfd_create(memfd_name(self.token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError:
            os.close(self.fd)
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` (bytes) to `offset`. Raises: KVTransferError when the kernel has no memory for it."""
        while data:
            try:
                num_written = os.pwrite(self.fd, data, offset)
            except OSError as err:
                raise KVTransferError(f"cannot stage {len(data)} bytes at {offset}: {err}") from err
            offset += num_written
            data = data[num_written:]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return up to `num_bytes` bytes from `offset`."""
        return os.pread(self.fd, num_bytes, offset)

    def read_into(self, target: memoryview) -> None:
        """Copy the start of the payload into `target`, which is at most `num_bytes` long."""
        offset = 0
        while target:
            num_read = os.preadv(self.fd, [target], offset)
            assert num_read > 0, f"payload of {self.num_bytes} bytes ends at {offset}"
            offset += num_read
            target = target[num_read:]

    def hold(self) -> None:
        """Add a holder; only for someone who knows that there is one already."""
        with self._lock:
            assert self._num_holders > 0, f"{self.token} is already free"
            self._num_holders += 1

    def drop(self) -> None:
        """Remove a holder; the last one frees the memory."""
        with self._lock:
            assert self._num_holders > 0, f"{self.token} is already free"
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            os.close(self.fd)
            self._on_free(self.num_bytes)


def memfd_name(token: str) -> str:
    """Name of the memfd, as /proc shows it to both ends."""
    return f"dsv4-kv-{token}"
