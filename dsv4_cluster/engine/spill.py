"""What falls out of the pools goes to the second tier, and comes back from there instead of being computed again.

An entry of the prefix index is stored page by page: entries of one conversation share pages, so each page's bytes are
stored once. A page is named after its allocation, not its id, because ids are used again; a restored page keeps the
name under which its bytes are stored. A half filled page is stored apart from the full one that it may become later.
A preempted sequence is stored as its live bytes at exactly the token where it was stopped.
"""

import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.kv.host_prefixes import HostPrefix, HostPrefixes
from dsv4_cluster.kv.host_tier import HostTier
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.kv.prefix_index import PrefixEntry
from dsv4_cluster.kv.snapshot import LiveSegment, export_live, live_segment_shapes
from dsv4_cluster.kv.snapshot_pool import SnapshotPool
from dsv4_cluster.protocol.stats import PrefixCacheStats

_PAGE, _SNAPSHOT, _SEQUENCE = b"page", b"snapshot", b"sequence"  # kinds of blobs, in front of their names
_NAME = struct.Struct("<QQ")  # allocation, tokens that count


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """Verified bytes of a prefix, out of reach of any later eviction."""

    entry: HostPrefix
    pages: list[torch.Tensor]  # each [page_bytes] uint8, in token order
    snapshot: torch.Tensor  # uint8, as SnapshotPool.read_bytes gives it
    from_disk: bool


class Spill:
    """Moves bytes between the pools and the second tier; who owns which page is the residency's business."""

    def __init__(self, kv_manager: KVManager, pools: KVPools, snapshots: SnapshotPool, tier: HostTier) -> None:
        self._kv = kv_manager
        self._pools = pools
        self._snapshots = snapshots
        self._tier = tier
        self._prefixes = HostPrefixes()
        self._names: dict[int, int] = {}  # allocation of a restored page -> allocation its bytes are stored under

    def store_prefix(self, entry: PrefixEntry) -> None:
        """Keep the bytes of an entry that is about to be evicted, as far as the tier has room."""
        if (known := self._prefixes.get(entry.key)) is not None:
            for blob in known.blobs:
                self._tier.touch(blob)
            return
        pages = [(self._page_blob(entry, i), page_id) for i, page_id in enumerate(entry.page_ids)]
        # Last page first: the beginning, which most conversations share, ends up as the most recently used.
        for blob, page_id in reversed(pages):
            if blob in self._tier:
                self._tier.touch(blob)
            else:
                self._lose(self._tier.put(blob, self._pools.read_page(page_id).cpu()))
        snapshot = _SNAPSHOT + entry.key
        self._lose(self._tier.put(snapshot, self._snapshots.read_bytes(entry.snapshot_id).cpu()))
        blobs = (*(blob for blob, _ in pages), snapshot)
        if all(blob in self._tier for blob in blobs):
            self._prefixes.add(HostPrefix(entry.key, entry.num_tokens, blobs))
        else:
            self._tier.discard(snapshot)

    def find_prefix(self, keys: list[bytes], max_tokens: int, *, above: int) -> HostPrefix | None:
        """The longest stored prefix of a chain of at most `max_tokens` tokens and more than `above`."""
        return self._prefixes.find(keys, max_tokens, above=above)

    def load_prefix(self, entry: HostPrefix) -> LoadedPrefix | None:
        """Read and verify a prefix. None = a miss: something of it is gone or damaged, and it is forgotten."""
        parts, from_disk = [], False
        for blob in entry.blobs:
            if (found := self._tier.get(blob)) is None:
                self._lose([blob])
                return None
            parts.append(found[0])
            from_disk |= found[1]
        return LoadedPrefix(entry, parts[:-1], parts[-1], from_disk)

    def restore_prefix(self, loaded: LoadedPrefix, page_ids: Seq[int], slot: int) -> None:
        """Write a loaded prefix into the first pages and the rings of a sequence."""
        num_tokens = loaded.entry.num_tokens
        for page_id, data in zip(page_ids, loaded.pages, strict=False):
            self._pools.write_page(page_id, data)
        self._snapshots.load_bytes(loaded.snapshot, slot, num_tokens)
        # A half filled page gets a name of its own: what fills it up differs from what once filled the stored one.
        for page_id, blob in zip(page_ids[: num_tokens // PAGE_TOKENS], loaded.entry.blobs, strict=False):
            self._names[self._kv.allocation(page_id)] = _NAME.unpack(blob[len(_PAGE) :])[0]
        num_bytes = sum(data.numel() for data in loaded.pages) + loaded.snapshot.numel()
        self._tier.count_hit(num_bytes, from_disk=loaded.from_disk)
        if len(self._names) > 4 * self._kv.num_pages:
            live = {self._kv.allocation(page_id) for page_id in range(self._kv.num_pages)}
            self._names = {allocation: name for allocation, name in self._names.items() if allocation in live}

    def store_sequence(self, request_id: str, page_ids: list[int], slot: int, num_tokens: int) -> bool:
        """Keep a sequence's live bytes after `num_tokens` tokens. Returns: False when the tier has no room."""
        segments = export_live(self._pools, page_ids, slot, num_tokens)
        key = _sequence_blob(request_id)
        self._tier.discard(key)
        self._lose(self._tier.put(key, torch.cat([segment.data for segment in segments]).cpu()))
        return key in self._tier

    def load_sequence(self, request_id: str, num_tokens: int) -> list[LiveSegment] | None:
        """Take a stored sequence out of the tier. None = it is gone or damaged."""
        key = _sequence_blob(request_id)
        found = self._tier.get(key)
        if found is None:
            return None
        self._tier.discard(key)
        data, from_disk = found
        self._tier.count_hit(data.numel(), from_disk=from_disk)
        segments, offset = [], 0
        for pool, layer_start, layer_end, num_rows, num_bytes in live_segment_shapes(self._pools.layout, num_tokens):
            part = data[offset : offset + num_bytes]
            segments.append(
                LiveSegment(pool=pool, layer_start=layer_start, layer_end=layer_end, num_rows=num_rows, data=part)
            )
            offset += num_bytes
        return segments

    def forget_sequence(self, request_id: str) -> None:
        """Drop the bytes of a sequence that will not come back."""
        self._tier.discard(_sequence_blob(request_id))

    def forget_prefix(self, key: bytes) -> None:
        """Drop a prefix that nobody shall resume from."""
        self._lose([_SNAPSHOT + key])
        self._tier.discard(_SNAPSHOT + key)

    def stats(self) -> PrefixCacheStats:
        """The tier's part of the counters."""
        counters = self._tier.counters
        return PrefixCacheStats(
            host_bytes=self._tier.memory_used,
            disk_bytes=self._tier.disk_used,
            total_bytes_stored=counters.bytes_stored,
            total_bytes_restored=counters.bytes_restored,
            total_host_hits=counters.num_memory_hits,
            total_disk_hits=counters.num_disk_hits,
            total_tier_failures=counters.num_failures,
        )

    def check(self) -> None:
        """Prove that the tier is within its limits. Raises: AssertionError."""
        self._tier.check()

    def _page_blob(self, entry: PrefixEntry, i: int) -> bytes:
        allocation = self._kv.allocation(entry.page_ids[i])
        num_tokens = min(PAGE_TOKENS, entry.num_tokens - i * PAGE_TOKENS)
        return _PAGE + _NAME.pack(self._names.get(allocation, allocation), num_tokens)

    def _lose(self, blobs: list[bytes]) -> None:
        for blob in self._prefixes.lose(blobs):
            self._tier.discard(blob)


def create_spill(kv_manager: KVManager, pools: KVPools, snapshots: SnapshotPool, kv: KVConfig) -> Spill | None:
    """The second tier of one engine, None when it has no room to use."""
    if kv.host_memory_bytes + kv.host_disk_bytes == 0:
        return None
    directory = None if kv.host_disk_dir is None else Path(kv.host_disk_dir)
    tier = HostTier(memory_bytes=kv.host_memory_bytes, disk_bytes=kv.host_disk_bytes, directory=directory)
    return Spill(kv_manager, pools, snapshots, tier)


def _sequence_blob(request_id: str) -> bytes:
    return _SEQUENCE + request_id.encode()
