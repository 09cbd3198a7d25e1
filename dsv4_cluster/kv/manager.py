"""Who owns which page and which slot: integers only, the tensors are in `pools.py`.

A sequence owns one slot (its window and state rings) and enough pages for the tokens it covers. Only the length moves:
growing takes pages, rolling back returns those past the new end, and rows beyond the length are invisible by position.

Pages are shared: sequences and leases (the prefix index holds one per entry) own pages together, and a page is free
when nobody owns it. A shared page is never written: who resumes behind it writes into pages of its own.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from dsv4_cluster.kv.allocator import IdAllocator
from dsv4_cluster.kv.page_table import num_pages_for


@dataclass(slots=True)
class _Owned:
    slot: int
    page_ids: list[int] = field(default_factory=list)


class KVManager:
    """Pages and slots of one engine. Running out is a return value, never an error; misuse is an assertion."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self._pages = IdAllocator(num_pages)
        self._slots = IdAllocator(num_slots)
        self._owned: dict[str, _Owned] = {}
        self._leases: dict[Hashable, tuple[int, ...]] = {}
        self._num_owners = [0] * num_pages  # by page: sequences and leases
        self._num_sequences = [0] * num_pages  # by page: sequences only
        self._allocations = [0] * num_pages  # by page: which allocation it is, never used twice
        self._num_allocations = 0
        self._num_in_use = 0  # pages that some sequence owns

    @property
    def num_pages(self) -> int:
        return self._pages.num_ids

    @property
    def num_slots(self) -> int:
        return self._slots.num_ids

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._pages.num_free

    @property
    def leased_pages(self) -> int:
        """Pages that leases own and no sequence does: free as soon as the leases end."""
        return self.num_pages - self.free_pages - self._num_in_use

    @property
    def free_slots(self) -> int:
        return self._slots.num_free

    def allocate(self, seq_id: str, num_tokens: int, *, shared: Sequence[int] = ()) -> bool:
        """Give a new sequence a slot and pages for `num_tokens`, the first of them `shared` with their owners.

        Returns: False when there is not enough of either; nothing changed then.
        """
        assert seq_id not in self._owned, f"{seq_id} is allocated already"
        num_new = num_pages_for(num_tokens) - len(shared)
        assert num_new >= 0, f"{seq_id}: {len(shared)} shared pages for {num_tokens} tokens"
        if self.free_slots == 0 or num_new > self.free_pages:
            return False
        slots = self._slots.take(1)
        page_ids = self._take(num_new)
        assert slots is not None and page_ids is not None, (self.free_slots, self.free_pages, num_tokens)
        self._owned[seq_id] = _Owned(slots[0], [*shared, *page_ids])
        self._use(self._owned[seq_id].page_ids)
        return True

    def extend(self, seq_id: str, num_tokens: int) -> bool:
        """Make the pages cover `num_tokens` in total; never shrinks. False = not enough pages, nothing changed."""
        owned = self._owned[seq_id]
        missing = num_pages_for(num_tokens) - len(owned.page_ids)
        if missing <= 0:
            return True
        page_ids = self._take(missing)
        if page_ids is None:
            return False
        owned.page_ids += page_ids
        self._use(page_ids)
        return True

    def free(self, seq_id: str) -> None:
        """Return everything the sequence owns: pages, window and state together."""
        owned = self._owned.pop(seq_id)
        self._leave(owned.page_ids)
        self._slots.give_back([owned.slot])

    def lease(self, key: Hashable, page_ids: Sequence[int]) -> None:
        """Own pages under `key` besides those who own them already, until `release`."""
        assert key not in self._leases, f"{key!r} is leased already"
        for page_id in page_ids:
            assert self._num_owners[page_id] > 0, f"page {page_id} has no owner to share it with"
            self._num_owners[page_id] += 1
        self._leases[key] = tuple(page_ids)

    def allocation(self, page_id: int) -> int:
        """Number of the allocation that the page is: another one whenever it was free in between."""
        return self._allocations[page_id]

    def release(self, key: Hashable) -> None:
        """End a lease; pages without another owner become free."""
        self._drop(self._leases.pop(key))

    def num_owners(self, page_id: int) -> int:
        """Sequences and leases that own a page."""
        return self._num_owners[page_id]

    def is_in_use(self, page_id: int) -> bool:
        """True when a sequence owns the page."""
        return self._num_sequences[page_id] > 0

    def num_pages_in_use(self, *, without: Iterable[str] = ()) -> int:
        """Pages that sequences own, those left out aside."""
        left_out = set(without)
        if not left_out:
            return self._num_in_use
        kept = (owned.page_ids for seq_id, owned in self._owned.items() if seq_id not in left_out)
        return len({page_id for page_ids in kept for page_id in page_ids})

    def seq_ids(self) -> set[str]:
        """Sequences that own pages."""
        return set(self._owned)

    def lease_keys(self) -> set[Hashable]:
        """Leases that own pages."""
        return set(self._leases)

    def page_ids(self, seq_id: str) -> list[int]:
        """Pages of the sequence in token order (a copy)."""
        return list(self._owned[seq_id].page_ids)

    def slot(self, seq_id: str) -> int:
        """Slot of the sequence's rings."""
        return self._owned[seq_id].slot

    def check(self) -> None:
        """Prove that free + owned = total and every page counts its owners. Raises: AssertionError with the numbers."""
        for seq_id, owned in self._owned.items():
            twice = sorted(page_id for page_id, count in Counter(owned.page_ids).items() if count > 1)
            assert not twice, f"{seq_id} owns pages {twice} twice"
        owners = Counter(page_id for pages in self._leases.values() for page_id in pages)
        sequences = Counter(page_id for owned in self._owned.values() for page_id in owned.page_ids)
        owners += sequences
        _check_partition("page", self._pages, list(owners))
        for page_id in range(self.num_pages):
            counted = (self._num_owners[page_id], self._num_sequences[page_id])
            found = (owners[page_id], sequences[page_id])
            assert counted == found, f"page {page_id} counts {counted} (owners, sequences), {found} own it"
        assert self._num_in_use == len(sequences), (self._num_in_use, len(sequences))
        _check_partition("slot", self._slots, [owned.slot for owned in self._owned.values()])

    def _take(self, num_pages: int) -> list[int] | None:
        page_ids = self._pages.take(num_pages)
        for page_id in page_ids or ():
            self._num_allocations += 1
            self._allocations[page_id] = self._num_allocations
        return page_ids

    def _use(self, page_ids: Sequence[int]) -> None:
        for page_id in page_ids:
            self._num_owners[page_id] += 1
            self._num_in_use += self._num_sequences[page_id] == 0
            self._num_sequences[page_id] += 1

    def _leave(self, page_ids: Sequence[int]) -> None:
        for page_id in page_ids:
            self._num_sequences[page_id] -= 1
            self._num_in_use -= self._num_sequences[page_id] == 0
        self._drop(page_ids)

    def _drop(self, page_ids: Sequence[int]) -> None:
        unowned = []
        for page_id in page_ids:
            self._num_owners[page_id] -= 1
            if self._num_owners[page_id] == 0:
                unowned.append(page_id)
        self._pages.give_back(unowned)


def _check_partition(noun: str, allocator: IdAllocator, owned: list[int]) -> None:
    free = allocator.free_ids()
    assert len(free) + len(owned) == allocator.num_ids, (
        f"{len(free)} free + {len(owned)} owned != {allocator.num_ids} {noun}s"
    )
    counts = Counter(free + owned)
    twice = sorted(i for i, count in counts.items() if count > 1)
    assert not twice, f"{noun}s {twice} have two owners"
    strays = sorted(i for i in counts if not 0 <= i < allocator.num_ids)
    assert not strays, f"{noun}s {strays} do not exist, there are {allocator.num_ids}"
