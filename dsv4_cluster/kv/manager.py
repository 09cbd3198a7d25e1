"""Who owns which page and which slot: integers only, the tensors are in `pools.py`.

A sequence owns one slot (its window and state rings) and enough pages for the tokens it covers. Only the length moves:
growing takes pages, rolling back returns those past the new end, and rows beyond the length are invisible by position.
"""

from collections import Counter
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

    @property
    def num_pages(self) -> int:
        return self._pages.num_ids

    @property
    def num_slots(self) -> int:
        return self._slots.num_ids

    @property
    def free_pages(self) -> int:
        return self._pages.num_free

    @property
    def free_slots(self) -> int:
        return self._slots.num_free

    def can_admit(self, num_tokens: int) -> bool:
        """True when `allocate` of that many tokens would succeed."""
        return self.free_slots > 0 and num_pages_for(num_tokens) <= self.free_pages

    def allocate(self, seq_id: str, num_tokens: int) -> bool:
        """Give a new sequence a slot and pages for `num_tokens`. False = not enough of either, nothing changed."""
        assert seq_id not in self._owned, f"{seq_id} is allocated already"
        if not self.can_admit(num_tokens):
            return False
        slots = self._slots.take(1)
        page_ids = self._pages.take(num_pages_for(num_tokens))
        assert slots is not None and page_ids is not None, (self.free_slots, self.free_pages, num_tokens)
        self._owned[seq_id] = _Owned(slots[0], page_ids)
        return True

    def extend(self, seq_id: str, num_tokens: int) -> bool:
        """Make the pages cover `num_tokens` in total; never shrinks. False = not enough pages, nothing changed."""
        owned = self._owned[seq_id]
        missing = num_pages_for(num_tokens) - len(owned.page_ids)
        if missing <= 0:
            return True
        page_ids = self._pages.take(missing)
        if page_ids is None:
            return False
        owned.page_ids += page_ids
        return True

    def rollback(self, seq_id: str, num_tokens: int) -> None:
        """Return the pages past the first `num_tokens` tokens."""
        owned = self._owned[seq_id]
        keep = num_pages_for(num_tokens)
        self._pages.give_back(owned.page_ids[keep:])
        del owned.page_ids[keep:]

    def free(self, seq_id: str) -> None:
        """Return everything the sequence owns: pages, window and state together."""
        owned = self._owned.pop(seq_id)
        self._pages.give_back(owned.page_ids)
        self._slots.give_back([owned.slot])

    def seq_ids(self) -> set[str]:
        """Sequences that own pages."""
        return set(self._owned)

    def page_ids(self, seq_id: str) -> list[int]:
        """Pages of the sequence in token order (a copy)."""
        return list(self._owned[seq_id].page_ids)

    def slot(self, seq_id: str) -> int:
        """Slot of the sequence's rings."""
        return self._owned[seq_id].slot

    def check(self) -> None:
        """Prove that free + owned = total and nothing has two owners. Raises: AssertionError with the numbers."""
        pages = [page_id for owned in self._owned.values() for page_id in owned.page_ids]
        _check_partition("page", self._pages, pages)
        _check_partition("slot", self._slots, [owned.slot for owned in self._owned.values()])


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
