"""The story of one request: what reaches the client, in which order, and what is recomputed after a failure."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dsv4_cluster.errors import (
    DeadlineExceededError,
    Dsv4Error,
    InvalidRequestError,
    KVTransferError,
    LayoutMismatchError,
    LeaseExpiredError,
    NonFiniteLogitsError,
    OverloadedError,
    PromptTooLongError,
    WorkerLostError,
)
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from tests.kit.scripted_replicas import ANSWER, HANG, ScriptedDecode, ScriptedPrefill, chunk, request


def run(orchestrator, generation=None) -> tuple[list[int], Exception | None]:
    """All tokens a client gets, and the error that ended them."""

    async def collect() -> tuple[list[int], Exception | None]:
        tokens: list[int] = []
        try:
            async for piece in orchestrator.generate(generation or request()):
                tokens += piece.token_ids
        except Exception as err:
            return tokens, err
        finally:
            await orchestrator.close()
        return tokens, None

    return asyncio.run(collect())


def test_the_answer_is_the_first_token_and_then_the_decoded_ones(make_orchestrator):
    prefill, decode = ScriptedPrefill(), ScriptedDecode()

    tokens, err = run(make_orchestrator(prefill, decode))

    assert (tokens, err) == (list(ANSWER), None)
    assert decode.requests[0].first_token_id == ANSWER[0]
    assert decode.requests[0].ticket.ticket_id == "ticket-0"
    assert (decode.num_ended, decode.num_aborted, prefill.released) == (1, 0, [])


def test_the_first_token_is_streamed_before_decode_is_asked(make_orchestrator):
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    orchestrator = make_orchestrator(prefill, decode)

    async def first() -> tuple[TokenChunk, int]:
        stream = orchestrator.generate(request())
        piece = await anext(stream)
        num_calls = len(decode.requests)
        await stream.aclose()
        await orchestrator.close()
        return piece, num_calls

    piece, num_calls = asyncio.run(first())

    assert (piece.token_ids, num_calls) == ((ANSWER[0],), 0)
    assert prefill.released == ["ticket-0"]


def test_an_answer_that_ends_at_its_first_token_needs_no_decode(make_orchestrator):
    prefill, decode = ScriptedPrefill([1]), ScriptedDecode()

    assert run(make_orchestrator(prefill, decode)) == ([1], None)
    assert decode.requests == []


HANDOFF_ERRORS = [
    KVTransferError("lost"),
    LeaseExpiredError("late"),
    WorkerLostError("died"),
    OverloadedError("no pages"),
]


@pytest.mark.parametrize("err", HANDOFF_ERRORS, ids=lambda err: type(err).__name__)
def test_a_failed_handoff_is_recomputed_with_no_token_lost_or_doubled(make_orchestrator, err):
    prefill, decode = ScriptedPrefill(), ScriptedDecode([[err], [err]])

    tokens, failure = run(make_orchestrator(prefill, decode))

    assert (tokens, failure) == (list(ANSWER), None)
    assert prefill.epochs == [0, 1, 2]
    assert [r.epoch for r in decode.requests] == [r.ticket.epoch for r in decode.requests] == [0, 1, 2]
    assert prefill.released == ["ticket-0", "ticket-1"]
    assert decode.taken_over == ["ticket-2"]


@pytest.mark.parametrize("err", [WorkerLostError("died"), KVTransferError("cannot publish")])
def test_a_failed_prefill_is_tried_again_with_the_next_epoch(make_orchestrator, err):
    prefill, decode = ScriptedPrefill([err]), ScriptedDecode()

    assert run(make_orchestrator(prefill, decode)) == (list(ANSWER), None)
    assert prefill.epochs == [0, 1]
    assert decode.requests[0].epoch == 1


def test_a_decode_stream_that_ends_before_its_first_token_is_a_lost_worker(make_orchestrator):
    prefill, decode = ScriptedPrefill(), ScriptedDecode([[]])

    assert run(make_orchestrator(prefill, decode)) == (list(ANSWER), None)
    assert prefill.epochs == [0, 1]


@pytest.mark.parametrize("settings, num_attempts", [({}, 3), ({"max_attempts": 1}, 1)])
def test_attempts_are_bounded_and_every_lease_is_released(make_orchestrator, settings, num_attempts):
    prefill, decode = ScriptedPrefill(), ScriptedDecode([[KVTransferError("lost")]] * 5)

    tokens, err = run(make_orchestrator(prefill, decode, **settings))

    assert tokens == [ANSWER[0]]
    assert isinstance(err, KVTransferError)
    assert len(prefill.epochs) == num_attempts
    assert prefill.released == prefill.published


@pytest.mark.parametrize(
    "err", [LayoutMismatchError("other weights"), NonFiniteLogitsError("NaN"), RuntimeError("bug")]
)
def test_errors_that_a_retry_cannot_help_are_raised_at_once(make_orchestrator, err):
    for prefill, decode in (
        (ScriptedPrefill([err]), ScriptedDecode()),
        (ScriptedPrefill(), ScriptedDecode([[err]])),
    ):
        _, failure = run(make_orchestrator(prefill, decode))

        assert failure is err
        assert prefill.epochs == [0]
        assert prefill.released == prefill.published


def test_a_full_prefill_queue_is_told_to_the_client(make_orchestrator):
    prefill = ScriptedPrefill([OverloadedError("queue is full")])

    tokens, err = run(make_orchestrator(prefill, ScriptedDecode()))

    assert tokens == []
    assert isinstance(err, OverloadedError)


@pytest.mark.parametrize("steps", [[chunk(12), WorkerLostError("died")], [chunk(12)]], ids=["error", "cut stream"])
def test_a_decode_worker_that_dies_mid_stream_is_a_retryable_error(make_orchestrator, steps):
    prefill, decode = ScriptedPrefill(), ScriptedDecode([steps])

    tokens, err = run(make_orchestrator(prefill, decode))

    assert tokens == [11, 12]
    assert isinstance(err, WorkerLostError)
    assert err.retryable
    assert prefill.epochs == [0]


@pytest.mark.parametrize("after", [HANG, WorkerLostError("died")], ids=["hangs", "fails"])
def test_what_a_replica_does_after_the_last_token_changes_nothing(make_orchestrator, monkeypatch, after):
    monkeypatch.setattr("dsv4_cluster.router.orchestrator.CLOSE_TIMEOUT_S", 0.05)
    decode = ScriptedDecode([[chunk(12), chunk(1), after]])

    assert run(make_orchestrator(ScriptedPrefill(), decode)) == ([11, 12, 1], None)


def test_an_error_inside_a_chunk_is_raised(make_orchestrator):
    failed = TokenChunk(request_id="r", finish_reason=FinishReason.ERROR, error=NonFiniteLogitsError("NaN"))

    tokens, err = run(make_orchestrator(ScriptedPrefill(), ScriptedDecode([[chunk(12), failed]])))

    assert tokens == [11, 12]
    assert isinstance(err, NonFiniteLogitsError)


def test_a_recomputed_first_token_that_differs_is_an_error_not_a_wrong_answer(make_orchestrator):
    prefill, decode = ScriptedPrefill([11, 99]), ScriptedDecode([[KVTransferError("lost")]])

    tokens, err = run(make_orchestrator(prefill, decode))

    assert tokens == [11]
    assert type(err) is Dsv4Error
    assert prefill.released == prefill.published == ["ticket-0", "ticket-1"]


@pytest.mark.parametrize(
    "attempts, steps, phase, num_tokens",
    [
        ([HANG], [], "prefill", 0),
        ([], [HANG], "decode", 1),
        ([], [chunk(12), HANG], "decode", 2),
    ],
)
def test_the_time_limit_ends_every_phase(make_orchestrator, attempts, steps, phase, num_tokens):
    prefill, decode = ScriptedPrefill(attempts), ScriptedDecode([steps])
    orchestrator = make_orchestrator(prefill, decode, request_timeout_s=0.05)

    tokens, err = run(orchestrator)

    assert len(tokens) == num_tokens
    assert isinstance(err, DeadlineExceededError)
    assert phase in err.message
    assert prefill.num_aborted + decode.num_aborted == 1
    assert orchestrator.admission.num_in_flight == 0


def test_a_request_s_own_deadline_ends_it_before_the_routers_limit(make_orchestrator):
    orchestrator = make_orchestrator(ScriptedPrefill(), ScriptedDecode([[HANG]]), request_timeout_s=60)

    tokens, err = run(orchestrator, replace(request(), deadline_s=0.05))

    assert len(tokens) == 1 and isinstance(err, DeadlineExceededError)


@pytest.mark.parametrize("own_s", [None, 5.0, 500.0])
def test_replicas_are_told_how_much_time_is_left(make_orchestrator, own_s):
    """A time of the router's clock would mean nothing on another host."""
    decode = ScriptedDecode([[KVTransferError("lost")]])

    run(make_orchestrator(ScriptedPrefill(), decode, request_timeout_s=9), replace(request(), deadline_s=own_s))

    first, second = (call.request.deadline_s for call in decode.requests)
    limit_s = min(9.0, own_s or 9.0)
    assert limit_s - 4.0 < second <= first - 0.05 and first <= limit_s  # the second one after a back-off of 0.05 s


@pytest.mark.parametrize(
    "generation, kind",
    [
        (request(num_prompt_tokens=0), InvalidRequestError),
        (request(max_tokens=0), InvalidRequestError),
        (request(num_prompt_tokens=96, max_tokens=5), PromptTooLongError),
    ],
)
def test_a_request_that_cannot_run_reaches_no_replica(make_orchestrator, generation, kind):
    prefill = ScriptedPrefill()

    _, err = run(make_orchestrator(prefill, ScriptedDecode()), generation)

    assert isinstance(err, kind)
    assert prefill.epochs == []


def test_a_request_that_just_fits_is_run(make_orchestrator):
    generation = request(num_prompt_tokens=95, max_tokens=5)

    assert run(make_orchestrator(ScriptedPrefill(), ScriptedDecode()), generation) == (list(ANSWER), None)


def test_readiness_needs_the_probe_and_room_and_says_what_is_missing(make_orchestrator):
    async def is_down() -> list[str]:
        return ["no decode replica is up"]

    async def fails() -> list[str]:
        raise WorkerLostError("no replica")

    async def ask(**kwargs) -> list[str]:
        return list(await make_orchestrator(ScriptedPrefill(), ScriptedDecode(), **kwargs).unready_reasons())

    async def ask_when_full() -> list[str]:
        orchestrator = make_orchestrator(ScriptedPrefill(), ScriptedDecode(), probe=is_down, max_ongoing_requests=1)
        with orchestrator.admission.slot():
            return list(await orchestrator.unready_reasons())

    assert asyncio.run(ask()) == []
    assert asyncio.run(ask(probe=is_down)) == ["no decode replica is up"]
    assert asyncio.run(ask(probe=fails)) == ["no replica"]
    full, down = asyncio.run(ask_when_full())
    assert full == "1 requests are in flight, router.max_ongoing_requests is 1" and down == "no decode replica is up"
    assert isinstance(make_orchestrator(ScriptedPrefill(), ScriptedDecode()).model_names(), Sequence)
