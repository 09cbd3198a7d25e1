"""Which prefixes can be resumed: hashes and integers only.

A prefix is resumable only at a multiple of 128 tokens, where no HCA block is unfinished, and only with its pages, its
window rows and its CSA rows. An entry therefore stands for one such boundary and owns the very pages that were computed
together with its snapshot; entries of one conversation share pages. So a hit continues one past computation and never
joins rows of two, whatever was computed, chunked or evicted in between. Source: spec 6.6.

A prefix is named by the hash of its last block of 128 tokens chained over all blocks before it.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4_cluster.kv.allocator import IdAllocator

BLOCK_TOKENS = 128  # half a page: the HCA block, after which no HCA state is left. Source: spec 6.6
_HASH_BYTES = 16  # collisions must stay out of reach for an attacker, not only for chance


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """One resumable boundary."""

    key: bytes  # chained hash of its last block
    num_tokens: int  # a multiple of BLOCK_TOKENS
    page_ids: tuple[int, ...]  # pages of these tokens; the last one may be half filled
    snapshot_id: int  # row of the snapshot pool


def chain_root(tenant: str, cache_salt: str) -> bytes:
    """Start of a chain: prefixes are shared only within one tenant and salt."""
    tenant_bytes = tenant.encode()
    head = len(tenant_bytes).to_bytes(8, "little")  # so that no two (tenant, salt) pairs look alike
    return hashlib.blake2b(head + tenant_bytes + cache_salt.encode(), digest_size=_HASH_BYTES).digest()


def extend_chain(root: bytes, keys: list[bytes], token_ids: Sequence[int]) -> None:
    """Append the keys of the complete blocks of `token_ids` that `keys` does not cover yet. Mutates `keys`."""
    first = len(keys) * BLOCK_TOKENS
    end = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    if end <= first:
        return
    tokens = memoryview(array("q", token_ids[first:end])).cast("B")
    block_bytes = BLOCK_TOKENS * 8
    key = keys[-1] if keys else root
    for start in range(0, len(tokens), block_bytes):
        key = hashlib.blake2b(tokens[start : start + block_bytes], digest_size=_HASH_BYTES, key=key).digest()
        keys.append(key)


def common_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks that two chains share. Chained keys are equal up to that point and differ behind it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


class PrefixIndex:
    """Entries by key, the least recently used one first, and the rows of the snapshot pool."""

    def __init__(self, num_snapshots: int) -> None:
        self._snapshots = IdAllocator(num_snapshots)
        self._entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()
        self._last_pages: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def num_snapshots(self) -> int:
        return self._snapshots.num_ids

    @property
    def free_snapshots(self) -> int:
        return self._snapshots.num_free

    def find(self, keys: Sequence[bytes], max_tokens: int) -> PrefixEntry | None:
        """The longest resumable prefix of a chain of at most `max_tokens` tokens."""
        for block in range(min(len(keys), max_tokens // BLOCK_TOKENS) - 1, -1, -1):
            if (entry := self._entries.get(keys[block])) is not None:
                return entry
        return None

    def get(self, key: bytes) -> PrefixEntry | None:
        """The entry of that boundary."""
        return self._entries.get(key)

    def touch(self, key: bytes) -> None:
        """Make an entry the most recently used one."""
        self._entries.move_to_end(key)

    def insert(self, key: bytes, num_tokens: int, page_ids: Sequence[int]) -> PrefixEntry | None:
        """Add a boundary. Returns: the entry, whose snapshot has to be filled; None when no snapshot row is free."""
        assert key not in self._entries, f"{key.hex()} is indexed already"
        assert num_tokens % BLOCK_TOKENS == 0 and num_tokens > 0, num_tokens
        taken = self._snapshots.take(1)
        if taken is None:
            return None
        entry = PrefixEntry(key, num_tokens, tuple(page_ids), taken[0])
        self._entries[key] = entry
        self._last_pages[entry.page_ids[-1]] += 1
        return entry

    def remove(self, key: bytes) -> PrefixEntry:
        """Forget an entry; its snapshot row is free again, its pages are the caller's to release."""
        entry = self._entries.pop(key)
        self._last_pages[entry.page_ids[-1]] -= 1
        self._snapshots.give_back([entry.snapshot_id])
        return entry

    def num_ending_at(self, page_id: int) -> int:
        """Entries whose last page it is: two when a boundary in its middle and one at its end are kept."""
        return self._last_pages[page_id]

    def least_recent(self) -> Iterator[PrefixEntry]:
        """All entries, least recently used first."""
        return iter(self._entries.values())

    def check(self) -> None:
        """Prove that every snapshot row is free or belongs to one entry. Raises: AssertionError with the numbers."""
        used = [entry.snapshot_id for entry in self._entries.values()]
        assert sorted([*self._snapshots.free_ids(), *used]) == list(range(self.num_snapshots)), (
            f"{self.free_snapshots} free + {len(used)} used snapshots, {self.num_snapshots} in all: {sorted(used)}"
        )
        for key, entry in self._entries.items():
            assert key == entry.key, (key, entry)
        last_pages = Counter(entry.page_ids[-1] for entry in self._entries.values())
        assert last_pages == +self._last_pages, (last_pages, self._last_pages)


class SeenBlocks:
    """Recently seen chains, so that a boundary where conversations part gets a snapshot. Bounded, oldest first out."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, bool] = OrderedDict()  # key -> a snapshot there would have been used

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, keys: Sequence[bytes]) -> int:
        """Remember a new chain and mark where it leaves all earlier ones. Returns: blocks it shares with them."""
        shared = 0
        while shared < len(keys) and keys[shared] in self._blocks:
            shared += 1
        if shared:
            self._blocks[keys[shared - 1]] = True
        for key in reversed(keys):  # a block is always newer than those that only count behind it
            self._blocks.setdefault(key, False)
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
        return shared

    def mark(self, key: bytes) -> None:
        """Declare a block one behind which chains part."""
        self._blocks[key] = True

    def is_branch(self, key: bytes) -> bool:
        """True when chains were seen to part behind this block."""
        return self._blocks.get(key, False)
