"""EngineCore on requests that are wrong, leave early, stop early or break, and on what it reports."""

import math

import pytest
import torch

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KVTransferError,
    NonFiniteLogitsError,
    PromptTooLongError,
)
from dsv4_cluster.protocol.output import FinishReason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [3, 512]}, "512"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [3], "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": [3], "temperature": -0.5}, "temperature is -0.5"),
        ({"prompt": [3], "temperature": math.nan}, "temperature is nan"),
        ({"prompt": [3], "top_p": 0.0}, "top_p is 0.0"),
        ({"prompt": [3], "seed": 2**63}, "seed"),
        ({"prompt": [3], "logprobs": 5000}, "logprobs is 5000"),
        ({"prompt": [3], "token_ids": (600,)}, "600"),
    ],
)
def test_a_bad_request_is_refused_with_the_value(fields, message, make_engine, make_request):
    engine = make_engine()

    with pytest.raises(InvalidRequestError, match=message):
        engine.add(make_request("bad", **fields))

    assert not engine.has_work()


def test_a_request_beyond_the_cache_is_refused_with_both_numbers(make_engine, make_request):
    engine = make_engine(num_pages=2)

    with pytest.raises(PromptTooLongError, match=r"505 tokens and max_tokens is 8: together 513, the limit is 512"):
        engine.add(make_request("long", 505))


def test_a_duplicate_request_id_is_refused(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("same", 3))

    with pytest.raises(InvalidRequestError, match="same"):
        engine.add(make_request("same", 4))


def test_abort_in_any_phase_frees_everything(make_engine, make_request, run):
    engine = make_engine(num_pages=6, max_num_seqs=2, max_num_batched_tokens=64)
    for name in ("waiting", "second", "third"):
        engine.add(make_request(name, 200, max_tokens=30))
    engine.step()  # "waiting" is in the middle of its prompt, "third" has no slot

    for name in ("waiting", "third"):
        assert engine.abort(name)
        engine.check()
    assert not engine.abort("waiting")
    answers = run(engine)

    assert set(answers) == {"second"}
    assert engine.stats().free_pages == 6


def test_abort_while_decoding_and_while_held_frees_everything(make_engine, make_request):
    engine = make_engine(num_pages=6)
    engine.add(make_request("decoding", 20, max_tokens=50))
    engine.add(make_request("held", 20), hold_after_prefill=True)
    engine.step()
    engine.step()
    assert engine.stats().num_held == 1

    for name in ("held", "decoding"):
        assert engine.abort(name)
        engine.check()

    assert engine.stats().free_pages == 6
    assert not engine.has_work()
    with pytest.raises(InvalidRequestError, match="held"):
        engine.export_sequence("held")


def test_a_held_request_that_ends_with_its_first_token_is_not_held(make_engine, make_request):
    engine = make_engine()
    engine.add(make_request("x", 20, max_tokens=1), hold_after_prefill=True)

    chunk = engine.step().chunks[0]

    assert chunk.finish_reason is FinishReason.LENGTH
    assert engine.stats().num_held == 0


def test_a_stop_token_ends_the_answer_and_is_named(make_engine, make_request, run):
    free = run(make_engine(), make_request("x", 30, max_tokens=12))["x"]
    stop = free.token_ids[5]

    answer = run(make_engine(), make_request("x", 30, max_tokens=12, token_ids=(stop,)))["x"]

    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.chunks[-1].stop_token_id == stop


def test_min_tokens_postpones_a_stop_token(make_engine, make_request, run):
    free = run(make_engine(), make_request("x", 30, max_tokens=12))["x"]
    stop = free.token_ids[0]

    answer = run(make_engine(), make_request("x", 30, max_tokens=12, token_ids=(stop,), min_tokens=4))["x"]

    assert len(answer.token_ids) >= 4
    assert stop not in answer.token_ids[:4]


def test_logprobs_hold_the_token_and_the_most_probable(make_engine, make_request, run):
    answer = run(make_engine(), make_request("x", 9, logprobs=3, prompt_logprobs=2))["x"]

    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token_id in entry and len(entry) == 3  # greedy: the token is the most probable one
        assert max(entry.values()) == entry[token_id] <= 0
    prompt = make_request("x", 9).prompt_token_ids
    assert answer.prompt_logprobs[0] is None
    for token_id, entry in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True):
        assert token_id in entry and 2 <= len(entry) <= 3


def test_non_finite_logits_fail_that_request_only(make_engine, make_request, run, toy_model):
    embedding = toy_model.model.embed.weight
    healthy = embedding[7].clone()
    expected = run(make_engine(), make_request("good", [20, 30, 40]))["good"]
    with torch.no_grad():
        embedding[7] = float("nan")
    try:
        engine = make_engine()
        answers = run(engine, make_request("bad", [20, 7, 40]), make_request("good", [20, 30, 40]))
    finally:
        with torch.no_grad():
            embedding[7] = healthy

    assert answers["bad"].finish_reason is FinishReason.ERROR
    assert isinstance(answers["bad"].chunks[-1].error, NonFiniteLogitsError)
    assert answers["good"].token_ids == expected.token_ids
    assert engine.stats().free_pages == engine.stats().num_pages


def test_a_request_past_its_deadline_ends_with_an_error_wherever_it_is(make_engine, make_request, run):
    clock = ManualClock()
    engine = make_engine(max_num_seqs=1, clock=clock)
    engine.add(make_request("decoding", 20, max_tokens=50, fields={"deadline_s": 5.0}))
    engine.add(make_request("waiting", 20, fields={"deadline_s": 4.0}))
    engine.add(make_request("patient", 20, fields={"deadline_s": 1e6}))
    engine.step()
    clock.advance(5.0)

    answers = run(engine)

    assert set(answers) == {"decoding", "waiting", "patient"}
    for name in ("decoding", "waiting"):
        assert isinstance(answers[name].chunks[-1].error, DeadlineExceededError)
        assert answers[name].finish_reason is FinishReason.ERROR
    assert "1 of at most 50 tokens" in answers["decoding"].chunks[-1].error.message
    assert len(answers["patient"].token_ids) == 8
    assert engine.stats().free_pages == engine.stats().num_pages


def test_a_deadline_holds_across_engines_whose_clocks_have_nothing_in_common(
    make_engine, make_request, step_until_chunk
):
    clocks = ManualClock(1e6), ManualClock(5.0)
    prefill, decode = (make_engine(clock=clock) for clock in clocks)
    request = make_request("x", 20, max_tokens=50, fields={"deadline_s": 10.0})
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill)
    clocks[0].advance(4.0)

    assert decode.import_sequence(request.after(4.0), first.token_ids[0], prefill.export_sequence("x").segments)
    clocks[1].advance(5.9)
    decoded = decode.step().chunks
    clocks[1].advance(0.1)
    expired = decode.step().chunks

    assert decoded[0].error is None and isinstance(expired[0].error, DeadlineExceededError)


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan")])
def test_a_deadline_that_is_no_number_of_seconds_is_refused(make_engine, make_request, deadline_s):
    with pytest.raises(InvalidRequestError, match="deadline_s"):
        make_engine().add(make_request("x", 20, fields={"deadline_s": deadline_s}))


def test_import_without_room_changes_nothing_and_succeeds_later(make_engine, make_request, run):
    prefill, decode = make_engine(), make_engine(num_pages=2, max_num_seqs=1)
    request = make_request("x", 100)
    prefill.add(request, hold_after_prefill=True)
    first = prefill.step().chunks[0].token_ids[0]
    segments = prefill.export_sequence("x").segments
    decode.add(make_request("busy", 10, max_tokens=2))
    decode.step()

    assert not decode.import_sequence(request, first, segments)
    decode.check()
    run(decode)
    assert decode.import_sequence(request, first, segments)


def test_import_of_the_wrong_segments_is_refused_and_nothing_is_kept(make_engine, make_request):
    prefill, decode = make_engine(), make_engine()
    request = make_request("x", 100)
    prefill.add(request, hold_after_prefill=True)
    first = prefill.step().chunks[0].token_ids[0]
    segments = prefill.export_sequence("x").segments

    with pytest.raises(KVTransferError):
        decode.import_sequence(make_request("x", 101), first, segments)
    with pytest.raises(KVTransferError):
        decode.import_sequence(request, first, segments[:-1])

    decode.check()
    assert decode.stats().free_pages == decode.stats().num_pages


def test_stats_count_tokens_steps_and_queues(make_engine, make_request):
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("a", 20, max_tokens=3))
    engine.add(make_request("b", 30, max_tokens=3))

    engine.step()

    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 1, 30)
    assert (stats.total_prompt_tokens, stats.total_generated_tokens, stats.num_steps) == (20, 1, 1)
    assert stats.last_step_ms > 0
