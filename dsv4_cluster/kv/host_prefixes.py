"""Which prefixes the second tier can bring back: hashes and integers only, the bytes are in `host_tier.py`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4_cluster.kv.prefix_index import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class HostPrefix:
    """One resumable boundary in the second tier."""

    key: bytes  # as in PrefixEntry
    num_tokens: int
    blobs: tuple[bytes, ...]  # keys of its pages in token order, then of its snapshot


class HostPrefixes:
    """Entries share the blobs of the pages they share; an entry without one of its blobs is no entry."""

    def __init__(self) -> None:
        self._entries: dict[bytes, HostPrefix] = {}
        self._users: dict[bytes, set[bytes]] = {}  # blob -> entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> HostPrefix | None:
        """The entry of that name."""
        return self._entries.get(key)

    def add(self, entry: HostPrefix) -> None:
        """Add an entry whose blobs are all stored."""
        assert entry.key not in self._entries, f"{entry.key.hex()} is in the second tier already"
        self._entries[entry.key] = entry
        for blob in entry.blobs:
            self._users.setdefault(blob, set()).add(entry.key)

    def find(self, keys: Sequence[bytes], max_tokens: int, *, above: int) -> HostPrefix | None:
        """The longest prefix of a chain of at most `max_tokens` tokens and more than `above`."""
        for block in range(min(len(keys), max_tokens // BLOCK_TOKENS) - 1, above // BLOCK_TOKENS - 1, -1):
            if (entry := self._entries.get(keys[block])) is not None:
                return entry
        return None

    def lose(self, blobs: Iterable[bytes]) -> list[bytes]:
        """Forget all entries that need one of these blobs. Returns: blobs that nobody needs any more."""
        lost = set(blobs)
        broken = {key for blob in lost for key in self._users.get(blob, ())}
        unused = []
        for key in broken:
            for blob in self._entries.pop(key).blobs:
                self._users[blob].discard(key)
                if not self._users[blob]:
                    del self._users[blob]
                    unused.append(blob)
        return [blob for blob in unused if blob not in lost]
