"""What every transport promises, checked over all backends with the publisher in another process where one exists."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dsv4_cluster.errors import (
    KVTransferError,
    LayoutMismatchError,
    LeaseExpiredError,
    OverloadedError,
    PromptTooLongError,
    SegmentCorruptError,
    StaleEpochError,
)
from tests.kit.transfer_peer import Recipe, make_segments

RECIPES = (
    Recipe("window", 40_000, 1),
    Recipe("compressed", 4096, 2),
    Recipe("indexer", 0, 3),
    Recipe("state", 12_345, 4),
)
NUM_BYTES = sum(recipe.num_bytes for recipe in RECIPES)
LEASE_S = 10.0
MAX_STAGED_BYTES = 32 << 20


def publish(pair, request_id="req-a", epoch=3, recipes=RECIPES):
    return pair.publisher.publish(request_id, epoch, "layout", recipes)


def fetch(pair, ticket, request_id="req-a", epoch=3, layout_id="layout"):
    return pair.receiver.fetch(ticket, request_id=request_id, epoch=epoch, layout_id=layout_id)


def assert_equal_segments(found, expected):
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert replace(left, data=None) == replace(right, data=None)
        assert left.data.dtype == torch.uint8 and torch.equal(left.data, right.data)


def test_fetched_segments_equal_the_published_ones(pair):
    ticket = publish(pair)

    segments = fetch(pair, ticket)

    assert_equal_segments(segments, make_segments(RECIPES))
    assert (ticket.backend, ticket.num_tokens, ticket.num_bytes) == (pair.backend, 7, NUM_BYTES)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (1,), (4095, 1), (4096,), (4097,), (8192, 0, 1)])
def test_any_number_and_size_of_segments_travels(pair, sizes):
    recipes = tuple(Recipe("compressed", size, seed) for seed, size in enumerate(sizes))

    segments = fetch(pair, publish(pair, recipes=recipes))

    assert_equal_segments(segments, make_segments(recipes))


def test_a_ticket_can_be_fetched_again_until_it_is_released(pair):
    ticket = publish(pair)

    assert_equal_segments(fetch(pair, ticket), make_segments(RECIPES))
    assert_equal_segments(fetch(pair, ticket), make_segments(RECIPES))


def test_fetched_bytes_outlive_the_lease_and_are_private(pair):
    ticket = publish(pair)
    segments = fetch(pair, ticket)

    pair.receiver.release(ticket)
    segments[1].data.fill_(0)

    assert pair.publisher.state().num_staged_bytes == 0
    assert torch.equal(segments[0].data, make_segments(RECIPES)[0].data)
    assert torch.equal(segments[3].data, make_segments(RECIPES)[3].data)


def test_writing_to_fetched_bytes_does_not_reach_the_publisher(pair):
    ticket = publish(pair)

    for segment in fetch(pair, ticket):
        segment.data.fill_(0)

    assert_equal_segments(fetch(pair, ticket), make_segments(RECIPES))


def test_wrong_request_id_is_stale(pair):
    with pytest.raises(StaleEpochError, match="req-a"):
        fetch(pair, publish(pair), request_id="req-b")


@pytest.mark.parametrize("epoch", [2, 4])
def test_another_epoch_is_stale(pair, epoch):
    with pytest.raises(StaleEpochError, match=f"epoch {epoch}"):
        fetch(pair, publish(pair), epoch=epoch)


def test_another_layout_is_refused_for_good(pair):
    with pytest.raises(LayoutMismatchError, match="layout") as caught:
        fetch(pair, publish(pair), layout_id="layout with other weights")

    assert not caught.value.retryable


def test_a_forged_epoch_is_refused_by_the_publisher(pair):
    forged = replace(publish(pair), epoch=4)

    with pytest.raises(StaleEpochError):
        fetch(pair, forged, epoch=4)


def test_a_forged_request_id_is_refused_by_the_publisher(pair):
    forged = replace(publish(pair), request_id="req-b")

    with pytest.raises(StaleEpochError):
        fetch(pair, forged, request_id="req-b")


def test_a_forged_layout_is_refused_by_the_publisher(pair):
    forged = replace(publish(pair), layout_id="other")

    with pytest.raises(LayoutMismatchError):
        fetch(pair, forged, layout_id="other")


@pytest.mark.parametrize("offset", [0, 39_999, 40_000, NUM_BYTES - 1])
def test_one_flipped_bit_in_staging_is_corrupt(pair, offset):
    ticket = publish(pair)
    pair.publisher.flip_staged_bit(offset)

    with pytest.raises(SegmentCorruptError, match="checksum"):
        fetch(pair, ticket)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_wrong_length_is_corrupt(pair, difference):
    ticket = publish(pair)
    last = replace(ticket.segments[-1], num_bytes=ticket.segments[-1].num_bytes + difference)

    with pytest.raises(SegmentCorruptError):
        fetch(pair, replace(ticket, segments=(*ticket.segments[:-1], last)))


def test_swapped_segments_are_corrupt(pair):
    ticket = publish(pair, recipes=(Recipe("window", 4096, 1), Recipe("window", 4096, 1)))

    with pytest.raises(SegmentCorruptError):
        fetch(pair, replace(ticket, segments=ticket.segments[::-1]))


def test_an_expired_lease_is_refused_before_and_after_the_sweep(pair):
    ticket = publish(pair)
    pair.publisher.advance(LEASE_S)

    with pytest.raises(LeaseExpiredError):
        fetch(pair, ticket)
    assert pair.publisher.sweep() == 1
    with pytest.raises(LeaseExpiredError):
        fetch(pair, ticket)


def test_a_lease_is_live_until_its_last_moment(pair):
    ticket = publish(pair)
    pair.publisher.advance(LEASE_S - 0.001)

    assert pair.publisher.sweep() == 0
    assert_equal_segments(fetch(pair, ticket), make_segments(RECIPES))


def test_publish_sweeps_expired_leases(pair):
    publish(pair, "req-old")
    pair.publisher.advance(LEASE_S)

    publish(pair)

    state = pair.publisher.state()
    assert (state.num_leases, state.num_staged_bytes, state.num_memfds) == (1, NUM_BYTES, 1)


def test_an_unknown_ticket_is_refused_and_its_release_ignored(pair):
    unknown = replace(publish(pair), ticket_id="0" * 32)

    with pytest.raises(LeaseExpiredError):
        fetch(pair, unknown)
    pair.receiver.release(unknown)

    assert pair.publisher.state().num_leases == 1


@pytest.mark.parametrize("side", ["publisher", "receiver"])
def test_either_side_releases_once_or_twice(pair, side):
    first, second = publish(pair), publish(pair)

    getattr(pair, side).release(first)
    getattr(pair, side).release(first)

    state = pair.publisher.state()
    assert (state.num_leases, state.num_staged_bytes, state.num_memfds) == (1, NUM_BYTES, 1)
    with pytest.raises(LeaseExpiredError):
        fetch(pair, first)
    assert_equal_segments(fetch(pair, second), make_segments(RECIPES))


def test_staging_is_bounded_and_room_comes_back(pair):
    half = (Recipe("compressed", MAX_STAGED_BYTES // 2 + 1, 1),)
    first = publish(pair, recipes=half)

    with pytest.raises(OverloadedError, match="max_staged_bytes") as caught:
        publish(pair, recipes=half)
    pair.publisher.release(first)
    second = publish(pair, recipes=half)

    assert caught.value.retryable
    assert_equal_segments(fetch(pair, second), make_segments(half))


def test_a_payload_above_the_bound_is_refused_for_good(pair):
    with pytest.raises(PromptTooLongError, match=f"{MAX_STAGED_BYTES + 1} bytes .*={MAX_STAGED_BYTES}") as caught:
        publish(pair, recipes=(Recipe("compressed", MAX_STAGED_BYTES + 1, 1),))

    assert (caught.value.retryable, caught.value.http_status) == (False, 400)
    assert pair.publisher.state().num_staged_bytes == 0


def test_concurrent_fetches_and_releases_never_mix_payloads(pair):
    def one_request(idx: int) -> None:
        recipes = (Recipe("window", 10_000 + idx, idx), Recipe("state", 3000, 100 + idx))
        with publishing:  # the pipe to the other process carries one command at a time
            ticket = publish(pair, f"req-{idx}", idx, recipes)
        for _ in range(3):
            assert_equal_segments(fetch(pair, ticket, f"req-{idx}", idx), make_segments(recipes))
        pair.receiver.release(ticket)
        with pytest.raises(LeaseExpiredError):
            fetch(pair, ticket, f"req-{idx}", idx)

    publishing = threading.Lock()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(one_request, range(24)))

    assert pair.publisher.state().num_leases == 0


def test_release_during_fetches_gives_the_whole_payload_or_a_typed_error(pair):
    recipes = (Recipe("compressed", 1 << 20, 1),)
    expected = make_segments(recipes)
    outcomes = []

    def fetch_until_refused(ticket) -> None:
        try:
            while True:
                assert_equal_segments(fetch(pair, ticket), expected)
                has_fetched.set()
        except KVTransferError as err:
            outcomes.append(type(err))

    for _ in range(3):
        ticket, has_fetched = publish(pair, recipes=recipes), threading.Event()
        threads = [threading.Thread(target=fetch_until_refused, args=(ticket,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert has_fetched.wait(20)
        pair.receiver.release(ticket)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()

    assert outcomes == [LeaseExpiredError] * 9
