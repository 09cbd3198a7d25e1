"""Pages, windows and states of the prefix cache are counted apart, and so is what was short at an eviction."""

import pytest

from dsv4_cluster.engine.prefix_account import Cause, PrefixAccount
from dsv4_cluster.kv.snapshot_pool import SnapshotBytes
from dsv4_cluster.protocol.stats import PrefixCacheStats


@pytest.fixture
def layout(toy_model):
    return toy_model.layout


@pytest.fixture
def ask(make_request, run):
    """ask(engine, *prompts or lengths, max_tokens=): run requests one after the other, check the accounts."""
    names = iter(range(10_000))

    def run_all(engine, *prompts, max_tokens=2) -> PrefixCacheStats:
        for prompt in prompts:
            run(engine, make_request(f"q{next(names)}", prompt, prompt_logprobs=None, max_tokens=max_tokens))
        return engine.stats().prefix_cache

    return run_all


def test_a_boundary_that_gives_way_to_a_sequence_counts_as_short_of_pages(make_engine, ask, layout):
    engine = make_engine(num_pages=3, max_num_seqs=2)

    stats = ask(engine, 600, 700)  # 2 pages are kept of the first one, the second one needs all 3

    assert (stats.total_page_evictions, stats.total_snapshot_evictions) == (1, 0)
    assert stats.total_evicted_page_bytes == 2 * layout.page_bytes
    assert stats.total_evicted_window_bytes == SnapshotBytes.of(layout).window
    assert stats.total_evicted_state_bytes == SnapshotBytes.of(layout).state


def test_a_boundary_that_gives_way_to_another_counts_as_short_of_snapshots(make_engine, ask, layout):
    engine = make_engine(num_snapshots=1)

    stats = ask(engine, 600, 700)

    assert (stats.total_page_evictions, stats.total_snapshot_evictions) == (0, 1)
    assert stats.total_evicted_page_bytes == 2 * layout.page_bytes
    assert stats.total_evicted_window_bytes == stats.window_bytes == SnapshotBytes.of(layout).window
    assert stats.total_evicted_state_bytes == stats.state_bytes == SnapshotBytes.of(layout).state


def test_a_page_that_a_sequence_owns_as_well_is_not_evicted(make_engine, make_request, ask):
    engine = make_engine(num_snapshots=1)
    prompt = list(make_request("x", 600).prompt_token_ids)

    stats = ask(engine, prompt[:300], prompt)  # the second one resumes from the first one's boundary and needs its row

    assert stats.total_hits == stats.total_snapshot_evictions == 1
    assert stats.total_evicted_page_bytes == 0 < stats.total_evicted_window_bytes


def test_a_boundary_that_its_answer_replaces_is_not_evicted(make_engine, ask, layout):
    engine = make_engine()

    stats = ask(engine, 100, max_tokens=180)  # at 128, then at 256

    assert stats.total_page_evictions + stats.total_snapshot_evictions == stats.total_evicted_window_bytes == 0
    assert (stats.num_snapshots, stats.window_bytes) == (1, SnapshotBytes.of(layout).window)


@pytest.mark.parametrize("num_snapshots", [1, 2, 5])
@pytest.mark.parametrize("num_pages", [4, 9])
def test_the_books_close_at_idle(num_pages, num_snapshots, make_engine, make_request, run, layout):
    engine = make_engine(num_pages=num_pages, max_num_seqs=3, num_snapshots=num_snapshots)
    lengths = [300, 520, 140, 700, 300, 270, 520]

    run(engine, *(make_request(f"r{i}", n, prompt_logprobs=None, max_tokens=9) for i, n in enumerate(lengths)))

    stats = engine.stats().prefix_cache
    held_and_free = stats.page_bytes + engine._kv.free_pages * layout.page_bytes
    assert held_and_free == num_pages * layout.page_bytes
    pool = engine._residency._snapshots
    num_free = engine._residency._index.free_snapshots
    assert stats.window_bytes + num_free * pool.row_bytes.window == pool.windows.nbytes
    assert stats.state_bytes + num_free * pool.row_bytes.state == pool.states.nbytes
    num_evicted = stats.total_page_evictions + stats.total_snapshot_evictions
    assert stats.total_evicted_window_bytes == num_evicted * pool.row_bytes.window > 0


@pytest.mark.parametrize(
    ("cause", "evicted"),
    [
        (Cause.PAGES, (200, 16, 32)),
        (Cause.SNAPSHOTS, (200, 16, 32)),
        (Cause.REPLACED, (0, 0, 0)),
        (Cause.FAILED, (0, 0, 0)),
    ],
)
def test_only_what_ran_short_is_an_eviction(cause, evicted):
    account = PrefixAccount(100, SnapshotBytes(16, 32))
    account.add()
    account.remove(cause, 2)

    stats = account.fill(PrefixCacheStats(), num_cached_pages=0)

    found = (stats.total_evicted_page_bytes, stats.total_evicted_window_bytes, stats.total_evicted_state_bytes)
    assert found == evicted
    assert stats.window_bytes == stats.state_bytes == 0


@pytest.mark.parametrize("cause", Cause)
def test_a_boundary_that_is_gone_without_an_entry_in_the_books_is_found(cause):
    account = PrefixAccount(100, SnapshotBytes(16, 32))
    for _ in range(3):
        account.add()
    account.remove(cause, 1)

    account.check(2)
    with pytest.raises(AssertionError, match=r"3 boundaries added.*1 there"):
        account.check(1)
