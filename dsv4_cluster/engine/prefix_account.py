"""The books of the prefix cache: what it holds and gave up, by kind of memory, and why.

| kind    | what of a boundary                                | runs short when                | setting          |
|---------|---------------------------------------------------|--------------------------------|------------------|
| pages   | compressed entries and indexer keys, often shared | a sequence needs pages         | kv.num_pages     |
| windows | window rows of its snapshot                       | another boundary needs its row | kv.num_snapshots |
| states  | compressor states and last hidden state of it     | as windows: one id is both     | kv.num_snapshots |

A boundary gives way as a whole, whichever kind was short. So bytes say what went, the cause says what was missing.
"""

from collections import Counter
from dataclasses import replace
from enum import StrEnum

from dsv4_cluster.kv.snapshot_pool import SnapshotBytes
from dsv4_cluster.protocol.stats import PrefixCacheStats


class Cause(StrEnum):
    """Why a boundary left the index. The first two are evictions."""

    PAGES = "pages"  # a sequence needed pages
    SNAPSHOTS = "snapshots"  # another boundary needed its snapshot rows
    REPLACED = "replaced"  # the answer it belonged to reached its next boundary
    FAILED = "failed"  # the sequence that added it failed


_EVICTIONS = (Cause.PAGES, Cause.SNAPSHOTS)


class PrefixAccount:
    """Counts only; entries are in the index, pages in the manager."""

    def __init__(self, page_bytes: int, snapshot: SnapshotBytes) -> None:
        self._page_bytes = page_bytes
        self._snapshot = snapshot
        self._num_added = 0
        self._num_removed: Counter[Cause] = Counter()
        self._num_evicted_pages = 0

    def add(self) -> None:
        """A boundary joined the index."""
        self._num_added += 1

    def remove(self, cause: Cause, num_freed_pages: int) -> None:
        """A boundary left the index, and so many of its pages have no owner any more."""
        self._num_removed[cause] += 1
        if cause in _EVICTIONS:
            self._num_evicted_pages += num_freed_pages

    def fill(self, stats: PrefixCacheStats, *, num_cached_pages: int) -> PrefixCacheStats:
        """`stats` with this account's part. num_cached_pages: pages that boundaries own and no sequence does."""
        num_held = self._num_added - self._num_removed.total()
        num_evicted = sum(self._num_removed[cause] for cause in _EVICTIONS)
        return replace(
            stats,
            num_cached_pages=num_cached_pages,
            num_snapshots=num_held,
            page_bytes=num_cached_pages * self._page_bytes,
            window_bytes=num_held * self._snapshot.window,
            state_bytes=num_held * self._snapshot.state,
            total_evicted_page_bytes=self._num_evicted_pages * self._page_bytes,
            total_evicted_window_bytes=num_evicted * self._snapshot.window,
            total_evicted_state_bytes=num_evicted * self._snapshot.state,
            total_page_evictions=self._num_removed[Cause.PAGES],
            total_snapshot_evictions=self._num_removed[Cause.SNAPSHOTS],
        )

    def check(self, num_entries: int) -> None:
        """Prove that what came and did not go is there. Raises: AssertionError with the numbers."""
        assert self._num_added - self._num_removed.total() == num_entries, (
            f"{self._num_added} boundaries added, {dict(self._num_removed)} removed, {num_entries} there"
        )
