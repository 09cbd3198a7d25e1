"""What of a sequence is in the cache: the one place where the engine allocates, resumes, extends, indexes and frees.

| moment                        | effect                                                                           |
|-------------------------------|----------------------------------------------------------------------------------|
| `admit`                       | a slot and pages; the longest resumable prefix counts as computed                 |
| `cut`                         | a prompt chunk ends at the boundaries that get a snapshot                        |
| `extend`                      | pages for growth; entries of the prefix index give way, least recently used first |
| `commit`                      | boundaries that the step reached join the prefix index                           |
| `free`                        | pages stay with the index as far as it owns them                                 |

Which boundaries are kept is decided in `boundaries.py`; what happens to bytes that fall out of the pools in `spill.py`;
`prefix_account.py` counts.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.engine.boundaries import Boundaries, resume_limit
from dsv4_cluster.engine.prefix_account import Cause, PrefixAccount
from dsv4_cluster.engine.sequence import PrefixChain, Sequence
from dsv4_cluster.engine.spill import create_spill
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.kv.page_table import num_pages_for
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.kv.prefix_index import (
    BLOCK_TOKENS,
    PrefixEntry,
    PrefixIndex,
    chain_root,
    common_blocks,
    extend_chain,
)
from dsv4_cluster.kv.snapshot import LiveSegment, import_live
from dsv4_cluster.kv.snapshot_pool import SnapshotPool
from dsv4_cluster.protocol.stats import PrefixCacheStats


class Residency:
    """Allocation side of one engine. Owns the prefix index; the manager and the pools are the engine's."""

    def __init__(self, kv_manager: KVManager, pools: KVPools, kv: KVConfig, *, max_num_seqs: int) -> None:
        """Allocates the snapshot pool next to `pools`, and the second tier if `kv` gives it room."""
        self._kv = kv_manager
        self._pools = pools
        self._snapshots = SnapshotPool(pools, kv.snapshots_for(max_num_seqs))
        self._spill = create_spill(kv_manager, pools, self._snapshots, kv)
        self._is_enabled = kv.snapshots_for(max_num_seqs) > 0
        self._index = PrefixIndex(kv.snapshots_for(max_num_seqs))
        self._boundaries = Boundaries(kv)
        self._rolling: dict[bytes, int] = {}  # entry that only answers under way want -> how many of them
        self._num_hits = 0
        self._num_hit_tokens = 0
        self._account = PrefixAccount(pools.layout.page_bytes, self._snapshots.row_bytes)

    @property
    def available_pages(self) -> int:
        """Pages that no sequence owns; those of the prefix index are given up when they are needed."""
        return self._kv.free_pages + self._kv.leased_pages

    def stats(self) -> PrefixCacheStats:
        """Counters of now."""
        tier = PrefixCacheStats() if self._spill is None else self._spill.stats()
        counted = replace(tier, total_hits=self._num_hits, total_hit_tokens=self._num_hit_tokens)
        return self._account.fill(counted, num_cached_pages=self._kv.leased_pages)

    def observe(self, sequence: Sequence) -> None:
        """Hash a new sequence's tokens, once, and note where it parts from earlier ones."""
        if not self._is_enabled:
            return
        request, chain = sequence.request, sequence.chain
        chain.root = chain_root(request.tenant, request.cache_salt)
        extend_chain(chain.root, chain.keys, sequence.token_ids)
        self._boundaries.observe(chain.keys)

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and pages for all its tokens, and resume it as far as possible.

        Returns: False when slots or pages are short; nothing changed then.
        """
        chain = sequence.chain
        chain.prefill_end = len(sequence.token_ids)
        if not (self._unspill(sequence) or self._continue(sequence)):
            if not self._allocate(sequence.request_id, len(sequence.token_ids)):
                return False
            sequence.num_computed_tokens = 0
        if not chain.was_admitted:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._num_hits += sequence.num_computed_tokens > 0
            self._num_hit_tokens += sequence.num_computed_tokens
        chain.was_admitted = True
        self.forget(sequence)
        return True

    def adopt(self, sequence: Sequence, segments: Seq[LiveSegment]) -> bool:
        """Allocate for an imported sequence and write its live bytes: all but its last token are computed.

        Returns: False when slots or pages are short. Raises: KVTransferError. Nothing changed in both cases.
        """
        request_id, num_tokens = sequence.request_id, len(sequence.token_ids) - 1
        if not self._allocate(request_id, num_tokens + 1):
            return False
        try:
            import_live(self._pools, self._kv.page_ids(request_id), self._kv.slot(request_id), num_tokens, segments)
        except Exception:
            self._kv.free(request_id)
            raise
        sequence.num_computed_tokens = sequence.num_cached_tokens = num_tokens
        sequence.chain.was_admitted = True
        sequence.chain.prefill_end = num_tokens
        self.observe(sequence)
        self.commit(sequence, num_tokens - 1)
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the pages cover `num_tokens` in total. False = not enough pages, nothing changed."""
        if self._kv.extend(sequence.request_id, num_tokens):
            return True
        missing = num_pages_for(num_tokens) - len(self._kv.page_ids(sequence.request_id))
        return self._make_room(missing) and self._kv.extend(sequence.request_id, num_tokens)

    def free(self, sequence: Sequence) -> None:
        """Give back what a sequence owns: pages, window and state together."""
        self._kv.free(sequence.request_id)
        sequence.num_computed_tokens = 0

    def preempt(self, sequence: Sequence) -> None:
        """Free a sequence that will be admitted again.

        It resumes from what it indexed; where that would compute more than a block again, its live bytes are spilled.
        """
        num_tokens = sequence.num_computed_tokens
        if self._spill is not None:
            entry = self._find(sequence)
            if num_tokens - (entry.num_tokens if entry else 0) >= BLOCK_TOKENS:
                request_id = sequence.request_id
                place = (self._kv.page_ids(request_id), self._kv.slot(request_id))
                if self._spill.store_sequence(request_id, *place, num_tokens):
                    sequence.chain.spilled_tokens = num_tokens
        self.free(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the live bytes that are kept for a waiting sequence."""
        if self._spill is not None and sequence.chain.spilled_tokens:
            self._spill.forget_sequence(sequence.request_id)
            sequence.chain.spilled_tokens = 0

    def fits_without(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """True when `admit` would succeed for sure once the others are gone, whatever can be resumed."""
        leaving = [other.request_id for other in others]
        num_free = self._kv.num_pages - self._kv.num_pages_in_use(without=leaving)
        return self._kv.free_slots + len(leaving) > 0 and num_pages_for(len(sequence.token_ids)) <= num_free

    def discard(self, sequence: Sequence) -> None:
        """Take what a failed sequence added out of the index: nobody shall resume from it."""
        for key in sequence.chain.published:
            if key in self._index:
                self._drop(key, Cause.FAILED)
            if self._spill is not None:
                self._spill.forget_prefix(key)

    def cut(self, sequence: Sequence, end: int) -> int:
        """Where the prompt chunk from the last computed token towards `end` must end: the first kept boundary."""
        boundary = self._boundaries.first_kept(sequence, end) if self._is_enabled else None
        return end if boundary is None else boundary

    def is_coming(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """True when a running prompt is about to compute more of this sequence's prefix than can be resumed.

        That prompt is made to stop where the two part, so waiting costs no more than computing the prefix twice.
        """
        if not self._is_enabled:
            return False
        limit = resume_limit(sequence) // BLOCK_TOKENS
        entry = self._find(sequence)
        resumable = entry.num_tokens if entry else 0
        if self._spill is not None:
            stored = self._spill.find_prefix(sequence.chain.keys, limit * BLOCK_TOKENS, above=resumable)
            resumable = stored.num_tokens if stored else resumable
        for other in running:
            if other.num_computed_tokens >= other.chain.prefill_end:
                continue
            num_blocks = min(limit, common_blocks(sequence.chain.keys, other.chain.keys))
            boundary = num_blocks * BLOCK_TOKENS
            if boundary > max(other.num_computed_tokens, resumable):
                self._boundaries.mark_branch(sequence.chain.keys[num_blocks - 1])
                if self._boundaries.is_kept(other, boundary):
                    return True
        return False

    def commit(self, sequence: Sequence, start: int) -> None:
        """Index the boundary of a step that computed tokens [start, num_computed_tokens), if it is one to keep.

        Called when every pool has the rows of the tokens that count, and before the sequence is freed.
        """
        end = sequence.num_computed_tokens
        boundary = end // BLOCK_TOKENS * BLOCK_TOKENS
        if not self._is_enabled or boundary <= start or not self._is_in_rings(boundary, end):
            return
        chain = sequence.chain
        extend_chain(chain.root, chain.keys, sequence.token_ids[:end])
        is_answer = boundary >= chain.prefill_end
        if not (
            self._boundaries.is_kept(sequence, boundary) or (is_answer and self._boundaries.keeps_answer(sequence))
        ):
            return
        self._publish(sequence, boundary)

    def check(self) -> None:
        """Prove that every page, slot and snapshot is accounted for. Raises: AssertionError with the numbers."""
        self._kv.check()
        self._index.check()
        self._account.check(len(self._index))
        keys = {entry.key for entry in self._index.least_recent()}
        pages = {page_id for entry in self._index.least_recent() for page_id in entry.page_ids}
        num_cached = sum(not self._kv.is_in_use(page_id) for page_id in pages)
        assert num_cached == self._kv.leased_pages, f"{num_cached} cached pages, {self._kv.leased_pages} leased"
        assert self._kv.lease_keys() == keys, f"{len(self._kv.lease_keys())} leases, {len(keys)} entries"
        assert self._rolling.keys() <= keys, f"{len(self._rolling.keys() - keys)} rolling boundaries without an entry"
        if self._spill is not None:
            self._spill.check()

    def _find(self, sequence: Sequence) -> PrefixEntry | None:
        if not self._is_enabled:
            return None
        extend_chain(sequence.chain.root, sequence.chain.keys, sequence.token_ids)
        return self._index.find(sequence.chain.keys, resume_limit(sequence))

    def _continue(self, sequence: Sequence) -> bool:
        """Resume from the longest prefix of either tier. False = there is none, or no room for it."""
        entry = self._find(sequence)
        if self._restore(sequence, entry):
            return True
        entry = self._find(sequence)  # again: making room may have cost the first one
        return entry is not None and self._resume(sequence, entry)

    def _restore(self, sequence: Sequence, entry: PrefixEntry | None) -> bool:
        """Continue a past computation that only the second tier has, if it goes further than `entry`.

        Its bytes are read and verified before any page is touched, so evictions on the way cannot harm it.
        """
        num_tokens, request_id = len(sequence.token_ids), sequence.request_id
        if self._spill is None or not self._is_enabled:
            return False
        above = entry.num_tokens if entry else 0
        stored = self._spill.find_prefix(sequence.chain.keys, resume_limit(sequence), above=above)
        if stored is None or self._kv.free_slots == 0 or num_pages_for(num_tokens) > self.available_pages:
            return False
        loaded = self._spill.load_prefix(stored)
        if loaded is None or not self._allocate(request_id, num_tokens):
            return False
        self._spill.restore_prefix(loaded, self._kv.page_ids(request_id), self._kv.slot(request_id))
        sequence.num_computed_tokens = stored.num_tokens
        self._publish(sequence, stored.num_tokens)
        return True

    def _unspill(self, sequence: Sequence) -> bool:
        """Give a preempted sequence its live bytes back. False = they are not there, or there is no room."""
        request_id, num_tokens = sequence.request_id, sequence.chain.spilled_tokens
        if self._spill is None or num_tokens == 0 or not self._allocate(request_id, len(sequence.token_ids)):
            return False
        sequence.chain.spilled_tokens = 0
        segments = self._spill.load_sequence(request_id, num_tokens)
        if segments is None:
            self._kv.free(request_id)
            return False
        import_live(self._pools, self._kv.page_ids(request_id), self._kv.slot(request_id), num_tokens, segments)
        sequence.num_computed_tokens = num_tokens
        return True

    def _resume(self, sequence: Sequence, entry: PrefixEntry) -> bool:
        """Continue a past computation: share its full pages, copy a half filled one, restore the rings."""
        request_id, num_tokens = sequence.request_id, entry.num_tokens
        num_shared = num_tokens // PAGE_TOKENS
        pin = ("resume", request_id)  # one more owner, so that making room leaves this entry alone
        self._kv.lease(pin, entry.page_ids)
        is_allocated = self._allocate(
            request_id, len(sequence.token_ids), shared=entry.page_ids[:num_shared], pinned=entry.page_ids
        )
        self._kv.release(pin)
        if not is_allocated:
            return False
        if num_shared < len(entry.page_ids):
            self._pools.copy_page(entry.page_ids[num_shared], self._kv.page_ids(request_id)[num_shared])
        self._snapshots.load(entry.snapshot_id, self._kv.slot(request_id), num_tokens)
        sequence.num_computed_tokens = num_tokens
        self._index.touch(entry.key)
        if entry is not sequence.chain.rolling:
            self._rolling.pop(entry.key, None)
        return True

    def _allocate(self, request_id: str, num_tokens: int, *, shared: Seq[int] = (), pinned: Seq[int] = ()) -> bool:
        num_new = num_pages_for(num_tokens) - len(shared)
        if self._kv.free_slots == 0 or not self._make_room(num_new, pinned):
            return False
        return self._kv.allocate(request_id, num_tokens, shared=shared)

    def _make_room(self, num_pages: int, pinned: Seq[int] = ()) -> bool:
        """Evict until so many pages are free. False = not possible; then nothing is evicted.

        Owners of a page also own all pages before it, so an entry is worth evicting when only entries that end with the
        same page own its last page; one that others go beyond would lose its snapshot and free nothing.
        """
        num_pinned = sum(not self._kv.is_in_use(page_id) for page_id in pinned)
        if num_pages > self._kv.free_pages + self._kv.leased_pages - num_pinned:
            return False
        while self._kv.free_pages < num_pages:
            leaf = next(entry for entry in self._index.least_recent() if self._is_leaf(entry))
            self._evict(leaf, Cause.PAGES)
        return True

    def _is_leaf(self, entry: PrefixEntry) -> bool:
        last = entry.page_ids[-1]
        return self._kv.num_owners(last) == self._index.num_ending_at(last)

    def _evict(self, entry: PrefixEntry, cause: Cause) -> None:
        if self._spill is not None:
            self._spill.store_prefix(entry)
        self._drop(entry.key, cause)

    def _drop(self, key: bytes, cause: Cause) -> None:
        self._index.remove(key)
        self._rolling.pop(key, None)
        free_pages = self._kv.free_pages
        self._kv.release(key)
        self._account.remove(cause, self._kv.free_pages - free_pages)

    def _publish(self, sequence: Sequence, boundary: int) -> None:
        """Index a boundary. One that only answers under way want goes when the last of them is at its next one.

        Who ends there, resumes there or keeps it by policy wants it for good.
        """
        chain, key = sequence.chain, sequence.chain.keys[boundary // BLOCK_TOKENS - 1]
        is_answer = boundary >= chain.prefill_end
        if is_answer:
            self._leave_rolling(chain)
        if (entry := self._index.get(key)) is None:
            entry = self._insert(sequence, key, boundary)
            self._rolling[key] = 0
        else:
            self._index.touch(key)
        if not is_answer or self._boundaries.is_kept(sequence, boundary):
            self._rolling.pop(key, None)
        elif key in self._rolling:
            self._rolling[key] += 1
            chain.rolling = entry

    def _leave_rolling(self, chain: PrefixChain) -> None:
        """The answer goes beyond its rolling boundary."""
        entry, chain.rolling = chain.rolling, None
        if entry is None or self._index.get(entry.key) is not entry or entry.key not in self._rolling:
            return
        self._rolling[entry.key] -= 1
        if self._rolling[entry.key] == 0:
            self._drop(entry.key, Cause.REPLACED)

    def _insert(self, sequence: Sequence, key: bytes, boundary: int) -> PrefixEntry:
        if self._index.free_snapshots == 0:
            self._evict(next(self._index.least_recent()), Cause.SNAPSHOTS)
        page_ids = self._kv.page_ids(sequence.request_id)[: num_pages_for(boundary)]
        entry = self._index.insert(key, boundary, page_ids)
        assert entry is not None, self._index.num_snapshots
        self._account.add()
        self._kv.lease(key, page_ids)
        self._snapshots.save(entry.snapshot_id, self._kv.slot(sequence.request_id), boundary)
        sequence.chain.published.append(key)
        return entry

    def _is_in_rings(self, boundary: int, end: int) -> bool:
        """True while the rings still hold the rows before `boundary`: they keep `headroom` more than the live ones."""
        return end - boundary <= self._pools.layout.headroom
