"""What of a sequence is in the cache: the one place where the engine allocates, resumes, extends, indexes and frees.

| moment                        | effect                                                                           |
|-------------------------------|----------------------------------------------------------------------------------|
| `admit`                       | a slot and pages; the longest resumable prefix counts as computed                 |
| `cut`                         | a prompt chunk ends at the boundaries that get a snapshot                        |
| `extend`                      | pages for growth; entries of the prefix index give way, least recently used first |
| `commit`                      | boundaries that the step reached join the prefix index                           |
| `free`                        | pages stay with the index as far as it owns them                                 |

Which boundaries are kept: the last one of the prompt, the last one of the answer so far (it replaces the one before),
one every few pages, and those where prompts were seen to part. Each has a switch in `KVConfig`.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.kv.page_table import num_pages_for
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.kv.prefix_index import (
    BLOCK_TOKENS,
    PrefixEntry,
    PrefixIndex,
    SeenBlocks,
    chain_root,
    common_blocks,
    extend_chain,
)
from dsv4_cluster.kv.snapshot import LiveSegment, import_live
from dsv4_cluster.kv.snapshot_pool import SnapshotPool

_SEEN_BLOCKS_PER_PAGE = 8  # chains are remembered longer than their pages: a branch may show on the third visit


class Residency:
    """Allocation side of one engine. Owns the prefix index; the manager and the pools are the engine's."""

    def __init__(self, kv_manager: KVManager, pools: KVPools, snapshots: SnapshotPool, kv: KVConfig) -> None:
        self._kv = kv_manager
        self._pools = pools
        self._snapshots = snapshots
        self._config = kv
        self._is_enabled = kv.prefix_cache and snapshots.rows.shape[0] > 0
        self._index = PrefixIndex(snapshots.rows.shape[0])
        self._seen = SeenBlocks(_SEEN_BLOCKS_PER_PAGE * kv_manager.num_pages)
        self.num_hit_tokens = 0
        self.num_evicted_entries = 0

    @property
    def available_pages(self) -> int:
        """Pages that no sequence owns; those of the prefix index are given up when they are needed."""
        return self._kv.free_pages + self._kv.leased_pages

    @property
    def num_cached_pages(self) -> int:
        """Pages that only the prefix index owns."""
        return self._kv.leased_pages

    @property
    def num_entries(self) -> int:
        """Resumable boundaries, each with a snapshot."""
        return len(self._index)

    def observe(self, sequence: Sequence) -> None:
        """Hash a new sequence's tokens, once, and note where it parts from earlier ones."""
        if not self._is_enabled:
            return
        request, chain = sequence.request, sequence.chain
        chain.root = chain_root(request.tenant, request.cache_salt)
        extend_chain(chain.root, chain.keys, sequence.token_ids)
        self._seen.add(chain.keys)

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and pages for all its tokens, and resume it as far as possible.

        Returns: False when slots or pages are short; nothing changed then.
        """
        chain = sequence.chain
        entry = self._find(sequence)
        if not (entry is not None and self._resume(sequence, entry)):
            if not self._allocate(sequence.request_id, len(sequence.token_ids)):
                return False
            sequence.num_computed_tokens = 0
        if not chain.was_admitted:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_hit_tokens += sequence.num_computed_tokens
        chain.was_admitted = True
        chain.prefill_end = len(sequence.token_ids)
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
        """Free a sequence that will be admitted again; it resumes from the boundaries it indexed."""
        self.free(sequence)

    def fits_without(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """True when `admit` would succeed for sure once the others are gone, whatever can be resumed."""
        leaving = [other.request_id for other in others]
        num_free = self._kv.num_pages - self._kv.num_pages_in_use(without=leaving)
        return self._kv.free_slots + len(leaving) > 0 and num_pages_for(len(sequence.token_ids)) <= num_free

    def discard(self, sequence: Sequence) -> None:
        """Take what a failed sequence added out of the index: nobody shall resume from it."""
        for key in sequence.chain.published:
            if key in self._index:
                self._drop(key)

    def cut(self, sequence: Sequence, end: int) -> int:
        """Where the prompt chunk from the last computed token towards `end` must end: the first kept boundary."""
        if self._is_enabled:
            first = (sequence.num_computed_tokens // BLOCK_TOKENS + 1) * BLOCK_TOKENS
            for boundary in range(first, end, BLOCK_TOKENS):
                if self._is_kept(sequence, boundary):
                    return boundary
        return end

    def is_coming(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """True when a running prompt is about to compute more of this sequence's prefix than can be resumed.

        That prompt is made to stop where the two part, so waiting costs no more than computing the prefix twice.
        """
        if not self._is_enabled:
            return False
        limit = _resume_limit(sequence) // BLOCK_TOKENS
        entry = self._find(sequence)
        for other in running:
            if other.num_computed_tokens >= other.chain.prefill_end:
                continue
            num_blocks = min(limit, common_blocks(sequence.chain.keys, other.chain.keys))
            boundary = num_blocks * BLOCK_TOKENS
            if boundary > max(other.num_computed_tokens, entry.num_tokens if entry else 0):
                self._seen.mark(sequence.chain.keys[num_blocks - 1])
                if self._is_kept(other, boundary):
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
        if not (self._is_kept(sequence, boundary) or (is_answer and self._indexes_answer(sequence))):
            return
        self._publish(sequence, boundary)

    def check(self) -> None:
        """Prove that every page, slot and snapshot is accounted for. Raises: AssertionError with the numbers."""
        self._kv.check()
        self._index.check()
        keys = {entry.key for entry in self._index.least_recent()}
        assert self._kv.lease_keys() == keys, f"{len(self._kv.lease_keys())} leases, {len(keys)} entries"

    def _find(self, sequence: Sequence) -> PrefixEntry | None:
        if not self._is_enabled:
            return None
        extend_chain(sequence.chain.root, sequence.chain.keys, sequence.token_ids)
        return self._index.find(sequence.chain.keys, _resume_limit(sequence))

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
            self._evict(next(entry for entry in self._index.least_recent() if self._is_leaf(entry)))
        return True

    def _is_leaf(self, entry: PrefixEntry) -> bool:
        last = entry.page_ids[-1]
        return self._kv.num_owners(last) == self._index.num_ending_at(last)

    def _evict(self, entry: PrefixEntry) -> None:
        self._drop(entry.key)
        self.num_evicted_entries += 1

    def _drop(self, key: bytes) -> None:
        self._index.remove(key)
        self._kv.release(key)

    def _publish(self, sequence: Sequence, boundary: int) -> None:
        chain, key = sequence.chain, sequence.chain.keys[boundary // BLOCK_TOKENS - 1]
        if boundary >= chain.prefill_end:
            replaced, chain.rolling_key = chain.rolling_key, None if self._is_kept(sequence, boundary) else key
            if replaced is not None and replaced in self._index:
                self._drop(replaced)
        if key in self._index:
            self._index.touch(key)
            return
        if self._index.free_snapshots == 0:
            self._evict(next(self._index.least_recent()))
        page_ids = self._kv.page_ids(sequence.request_id)[: num_pages_for(boundary)]
        entry = self._index.insert(key, boundary, page_ids)
        assert entry is not None, self._index.num_snapshots
        self._kv.lease(key, page_ids)
        self._snapshots.save(entry.snapshot_id, self._kv.slot(sequence.request_id), boundary)
        chain.published.append(key)

    def _is_kept(self, sequence: Sequence, boundary: int) -> bool:
        """True when policy wants a snapshot there whatever comes later."""
        config, chain = self._config, sequence.chain
        if boundary > sequence.num_prompt_tokens and not self._indexes_answer(sequence):
            return False
        if config.snapshot_prompt_end and boundary in (
            _last_boundary(sequence.num_prompt_tokens - 1),
            _last_boundary(chain.prefill_end - 1),
        ):
            return True
        if config.snapshot_every_pages and boundary % (config.snapshot_every_pages * PAGE_TOKENS) == 0:
            return True
        block = boundary // BLOCK_TOKENS - 1
        return config.snapshot_branches and block < len(chain.keys) and self._seen.is_branch(chain.keys[block])

    def _indexes_answer(self, sequence: Sequence) -> bool:
        config = self._config
        return config.snapshot_answer_end and (config.cache_thinking or not sequence.request.thinking)

    def _is_in_rings(self, boundary: int, end: int) -> bool:
        """True while the rings still hold the rows before `boundary`: they keep `headroom` more than the live ones."""
        return end - boundary <= self._pools.layout.headroom


def _last_boundary(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _resume_limit(sequence: Sequence) -> int:
    """Most tokens that may come from the cache: the last one gives the logits, and so does the one before the first
    prompt log-probability that is still missing."""
    limit = len(sequence.token_ids) - 1
    if sequence.request.sampling.prompt_logprobs is None:
        return limit
    missing = (p for p in range(1, sequence.num_prompt_tokens) if p not in sequence.prompt_logprobs)
    return min(limit, next(missing, limit + 1) - 1)
