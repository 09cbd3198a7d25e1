"""Ownership of pages and slots: always accounted for, and a refusal changes nothing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from dsv4_cluster.kv.allocator import IdAllocator
from dsv4_cluster.kv.manager import KVManager

NUM_PAGES, NUM_SLOTS = 13, 4
lengths = st.integers(0, 256 * (NUM_PAGES + 2))


def pages_for(num_tokens: int) -> int:
    return len(range(0, num_tokens, 256))


class ManagerMachine(RuleBasedStateMachine):
    """Any sequence of calls, compared with a model of who owns what."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVManager(NUM_PAGES, NUM_SLOTS)
        self.pages: dict[str, list[int]] = {}  # the model: pages per sequence
        self.leases: dict[str, list[int]] = {}
        self.num_created = 0

    @property
    def num_pages(self) -> dict[str, int]:
        return {seq_id: len(pages) for seq_id, pages in self.pages.items()}

    def owned(self) -> set[int]:
        return {page_id for pages in (*self.pages.values(), *self.leases.values()) for page_id in pages}

    def snapshot(self) -> dict[str, tuple[int, list[int]]]:
        return {s: (self.manager.slot(s), self.manager.page_ids(s)) for s in self.manager.seq_ids()}

    def fits(self, num_pages: int) -> bool:
        return num_pages <= NUM_PAGES - len(self.owned())

    @rule(target=sequences, num_tokens=lengths)
    def allocate(self, num_tokens: int) -> str:
        seq_id, before = f"s{self.num_created}", self.snapshot()
        self.num_created += 1
        expected = len(self.num_pages) < NUM_SLOTS and self.fits(pages_for(num_tokens))
        assert self.manager.allocate(seq_id, num_tokens) == expected
        if expected:
            self.pages[seq_id] = self.manager.page_ids(seq_id)
            assert len(self.pages[seq_id]) == pages_for(num_tokens)
        else:
            assert self.snapshot() == before
        return seq_id

    @rule(seq_id=sequences, num_shared=st.integers(0, 6))
    def lease(self, seq_id: str, num_shared: int) -> None:
        if seq_id in self.pages:
            key = f"l{self.num_created}"
            self.num_created += 1
            self.leases[key] = self.pages[seq_id][:num_shared]
            self.manager.lease(key, self.leases[key])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[key]
        self.manager.release(key)

    @precondition(lambda self: self.leases)
    @rule(target=sequences, data=st.data(), num_more=st.integers(0, 700))
    def allocate_shared(self, data: st.DataObject, num_more: int) -> str:
        shared = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        seq_id, num_tokens = f"s{self.num_created}", len(shared) * 256 + num_more
        self.num_created += 1
        expected = len(self.pages) < NUM_SLOTS and self.fits(pages_for(num_tokens) - len(shared))
        assert self.manager.allocate(seq_id, num_tokens, shared=shared) == expected
        if expected:
            self.pages[seq_id] = self.manager.page_ids(seq_id)
            assert self.pages[seq_id][: len(shared)] == shared
        return seq_id

    @rule(seq_id=sequences, num_tokens=lengths)
    def extend(self, seq_id: str, num_tokens: int) -> None:
        if seq_id not in self.num_pages:
            return
        before = self.snapshot()
        grown = max(pages_for(num_tokens), self.num_pages[seq_id])
        expected = self.fits(grown - self.num_pages[seq_id])
        assert self.manager.extend(seq_id, num_tokens) == expected
        if expected:
            self.pages[seq_id] = self.manager.page_ids(seq_id)
            assert len(self.pages[seq_id]) == grown
            assert self.pages[seq_id][: len(before[seq_id][1])] == before[seq_id][1]
        else:
            assert self.snapshot() == before

    @rule(seq_id=consumes(sequences))
    def free(self, seq_id: str) -> None:
        if self.pages.pop(seq_id, None) is not None:
            self.manager.free(seq_id)

    @invariant()
    def every_page_and_slot_is_accounted_for(self) -> None:
        self.manager.check()
        assert self.manager.seq_ids() == set(self.num_pages)
        assert {s: self.manager.page_ids(s) for s in self.pages} == self.pages
        owned, in_use = self.owned(), {page_id for pages in self.pages.values() for page_id in pages}
        assert owned <= set(range(NUM_PAGES))
        assert self.manager.free_pages == NUM_PAGES - len(owned)
        assert self.manager.leased_pages == len(owned - in_use)
        slots = {self.manager.slot(s) for s in self.num_pages}
        assert len(slots) == len(self.num_pages) == NUM_SLOTS - self.manager.free_slots


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)


def test_page_ids_are_a_copy():
    manager = KVManager(4, 2)
    manager.allocate("a", 512)

    manager.page_ids("a").clear()

    assert len(manager.page_ids("a")) == 2
    manager.check()


def test_equal_calls_give_equal_pages():
    def run() -> list[int]:
        manager = KVManager(8, 2)
        manager.allocate("a", 700)
        manager.allocate("b", 300)
        manager.free("a")
        manager.extend("b", 1300)
        return manager.page_ids("b")

    assert run() == run()


def test_check_names_what_leaked():
    manager = KVManager(4, 2)
    manager.allocate("a", 512)
    manager._owned["a"].page_ids.pop()

    with pytest.raises(AssertionError, match=r"2 free \+ 1 owned != 4 pages"):
        manager.check()


def test_check_names_the_page_that_a_sequence_owns_twice():
    manager = KVManager(4, 2)
    manager.allocate("a", 512)
    manager._owned["a"].page_ids[1] = manager._owned["a"].page_ids[0]

    with pytest.raises(AssertionError, match=r"a owns pages \[0\] twice"):
        manager.check()


def test_check_names_the_page_whose_owners_are_miscounted():
    manager = KVManager(4, 2)
    manager.allocate("a", 512)
    manager.lease("l", manager.page_ids("a"))
    manager._leases["l"] = ()

    with pytest.raises(AssertionError, match=r"page 0 counts \(2, 1\) \(owners, sequences\), \(1, 1\) own it"):
        manager.check()


def test_a_leased_page_outlives_its_sequence_and_is_shared():
    manager = KVManager(4, 2)
    manager.allocate("a", 512)
    pages = manager.page_ids("a")
    manager.lease("l", pages)
    manager.free("a")

    assert manager.free_pages == 2 and manager.leased_pages == 2
    assert manager.allocate("b", 1024, shared=pages)
    assert manager.page_ids("b")[:2] == pages and manager.leased_pages == 0
    manager.check()
    manager.release("l")
    assert manager.free_pages == 0
    manager.free("b")
    assert manager.free_pages == 4
    manager.check()


def test_allocating_a_known_sequence_is_an_error():
    manager = KVManager(4, 2)
    manager.allocate("a", 1)

    with pytest.raises(AssertionError, match="a is allocated already"):
        manager.allocate("a", 1)


def test_allocator_refuses_a_double_free():
    allocator = IdAllocator(3)
    ids = allocator.take(2)
    allocator.give_back(ids)

    with pytest.raises(AssertionError, match="id 0 of 3 is freed twice"):
        allocator.give_back(ids)


def test_allocator_hands_out_everything_then_nothing():
    allocator = IdAllocator(3)

    assert sorted(allocator.take(3)) == [0, 1, 2]
    assert allocator.take(1) is None
    assert allocator.take(0) == []
    assert allocator.num_free == 0
