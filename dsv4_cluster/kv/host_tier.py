"""The second tier: bytes that fell out of the pools, in host memory and then in files on a local disk.

A blob comes back exactly as it was stored or not at all: every read is checked against the length and the 64-bit
checksum taken when it was stored, and a blob that is gone, short or damaged is a miss. Both levels are bounded and give
up what was used least recently; memory gives to the disk, the disk to nobody. Files live in a directory of this
process's own and go with it. Source of the checksum: XXH3 64-bit, see `transfer/checksum.py` for why.
"""

import hashlib
import shutil
import tempfile
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash


@dataclass(slots=True)
class TierCounters:
    """What the tier did so far. A tier that stores and never restores shows here."""

    bytes_stored: int = 0
    bytes_restored: int = 0
    num_memory_hits: int = 0  # of its users' lookups, not of blobs: see `HostTier.count_hit`
    num_disk_hits: int = 0
    num_failures: int = 0  # damaged, short or unreadable blobs


@dataclass(frozen=True, slots=True)
class _Stored:
    num_bytes: int
    checksum: int
    data: torch.Tensor | None  # [num_bytes] uint8 in memory, None when it is in a file


class HostTier:
    """Blobs by key. Synchronous; owned by one thread."""

    def __init__(self, *, memory_bytes: int, disk_bytes: int = 0, directory: Path | None = None) -> None:
        """directory: where the tier makes a directory of its own; None = the system's place for temporary files."""
        self._memory: OrderedDict[bytes, _Stored] = OrderedDict()  # least recently used first
        self._disk: OrderedDict[bytes, _Stored] = OrderedDict()
        self._memory_limit, self._disk_limit = memory_bytes, disk_bytes
        self.memory_used = 0
        self.disk_used = 0
        self.counters = TierCounters()
        self._directory: Path | None = None
        if disk_bytes:
            self._directory = Path(tempfile.mkdtemp(prefix="dsv4-tier-", dir=directory))
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)

    def __contains__(self, key: bytes) -> bool:
        return key in self._memory or key in self._disk

    def put(self, key: bytes, data: torch.Tensor) -> list[bytes]:
        """Store a blob. data: [num_bytes] uint8 on the CPU, contiguous; the tier keeps it, so it must not change.

        Returns: keys of the blobs that are gone for it, its own among them when it does not fit.
        """
        assert key not in self, f"{key.hex()} is stored already"
        self.counters.bytes_stored += data.numel()
        return self._to_memory(key, _Stored(data.numel(), _checksum(key, data), data))

    def get(self, key: bytes) -> tuple[torch.Tensor, bool] | None:
        """The blob and whether it came from a file; None when it is gone or does not verify. Not to be written to."""
        stored = self._memory.get(key) or self._disk.get(key)
        if stored is None:
            return None
        data = self._read(key) if stored.data is None else stored.data
        if data is None or data.numel() != stored.num_bytes or _checksum(key, data) != stored.checksum:
            self.counters.num_failures += 1
            self.discard(key)
            return None
        self.touch(key)
        return data, stored.data is None

    def touch(self, key: bytes) -> None:
        """Make a stored blob the most recently used one of its level."""
        (self._memory if key in self._memory else self._disk).move_to_end(key)

    def discard(self, key: bytes) -> None:
        """Forget a blob; unknown keys are ignored."""
        if (stored := self._memory.pop(key, None)) is not None:
            self.memory_used -= stored.num_bytes
        elif (stored := self._disk.pop(key, None)) is not None:
            self.disk_used -= stored.num_bytes
            self._path(key).unlink(missing_ok=True)

    def count_hit(self, num_bytes: int, *, from_disk: bool) -> None:
        """Something stored here was used instead of computed."""
        self.counters.bytes_restored += num_bytes
        self.counters.num_disk_hits += from_disk
        self.counters.num_memory_hits += not from_disk

    def check(self) -> None:
        """Prove that the levels are within their limits and count what they hold. Raises: AssertionError."""
        for used, limit, level in (
            (self.memory_used, self._memory_limit, self._memory),
            (self.disk_used, self._disk_limit, self._disk),
        ):
            held = sum(stored.num_bytes for stored in level.values())
            assert used == held <= limit, f"{used} bytes counted, {held} held, limit {limit}"
        assert not self._memory.keys() & self._disk.keys()

    def _to_memory(self, key: bytes, stored: _Stored) -> list[bytes]:
        if stored.num_bytes > self._memory_limit:
            return self._to_disk(key, stored)
        lost: list[bytes] = []
        while self.memory_used + stored.num_bytes > self._memory_limit:
            old_key, old = self._memory.popitem(last=False)
            self.memory_used -= old.num_bytes
            lost += self._to_disk(old_key, old)
        self._memory[key] = stored
        self.memory_used += stored.num_bytes
        return lost

    def _to_disk(self, key: bytes, stored: _Stored) -> list[bytes]:
        if stored.num_bytes > self._disk_limit:
            return [key]
        lost: list[bytes] = []
        while self.disk_used + stored.num_bytes > self._disk_limit:
            lost.append(next(iter(self._disk)))
            self.discard(lost[-1])
        assert stored.data is not None, key
        try:
            self._path(key).write_bytes(stored.data.numpy().data)
        except OSError:  # a full or missing disk: the blob is gone, which is a miss later, never an error
            self.counters.num_failures += 1
            self._path(key).unlink(missing_ok=True)
            return [*lost, key]
        self._disk[key] = _Stored(stored.num_bytes, stored.checksum, None)
        self.disk_used += stored.num_bytes
        return lost

    def _read(self, key: bytes) -> torch.Tensor | None:
        try:
            return torch.frombuffer(bytearray(self._path(key).read_bytes()), dtype=torch.uint8)
        except (OSError, ValueError):  # gone, unreadable or empty
            return None

    def _path(self, key: bytes) -> Path:
        assert self._directory is not None
        return self._directory / hashlib.blake2b(key, digest_size=16).hexdigest()


def _checksum(key: bytes, data: torch.Tensor) -> int:
    """Bound to the key: a blob under another name does not verify."""
    return xxhash.xxh3_64_intdigest(data.numpy().data, seed=xxhash.xxh3_64_intdigest(key))
