"""Speculation is lossless: whatever is drafted, the answer is that of plain decoding, token for token.

Verification computes k+1 rows of a sequence in one batch where plain decoding computes one, and two fp32 sums of the
same numbers may differ in their last bits. A token would flip only where the two best scores (logits, plus noise when
sampling) are closer than that: `assert_same` allows 1e-4, and `test_no_score_of_these_answers_is_a_near_tie` shows that
the greedy and seeded answers of this file are decided by more; those with edited logits are not checked for it.
"""

import pytest
import torch

from dsv4_cluster.protocol.output import FinishReason
from dsv4_kernels.sampling.op import gumbel_noise
from tests.kit.proposers import CountedProposer, NoisyTargetProposer, WrongAtProposer

SAMPLINGS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 11},
    "edited": {"temperature": 0.8, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
}
# Answers of 20 tokens from here cross t = 3 mod 4 five times, and t = 127 mod 128 from 112, 120 and 250.
LENGTHS = (1, 30, 112, 120, 250)
NUM_TOKENS = 20
VOCABULARY = 512


@pytest.fixture(scope="module")
def plain_answers() -> dict:
    """Answers of plain decoding by (length, sampling); filled on first use."""
    return {}


@pytest.fixture
def plain(plain_answers, make_engine, make_request, run):
    """plain(length, **sampling): what plain decoding answers, with whole distributions as log-probabilities."""

    def get(length: int, **sampling):
        key = (length, tuple(sorted(sampling.items())))
        if key not in plain_answers:
            request = make_request("x", length, **({"max_tokens": NUM_TOKENS, "logprobs": VOCABULARY} | sampling))
            plain_answers[key] = run(make_engine(), request)["x"]
        return plain_answers[key]

    return get


@pytest.fixture
def requests(make_request):
    """requests(**sampling): one per length."""

    def get(**sampling):
        return [make_request(f"n{n}", n, **({"max_tokens": NUM_TOKENS} | sampling)) for n in LENGTHS]

    return get


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, "auto"])
def test_drafts_of_the_mtp_layer_change_nothing(name, num_draft_tokens, plain, requests, make_engine, run, assert_same):
    engine = make_engine(num_draft_tokens=num_draft_tokens)

    answers = run(engine, *requests(**SAMPLINGS[name]))

    for n in LENGTHS:
        assert_same(answers[f"n{n}"], plain(n, **SAMPLINGS[name]))
    assert 0 <= engine.stats().total_accepted_tokens <= engine.stats().total_drafted_tokens > 0


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
def test_a_drafter_close_to_the_target_saves_steps_and_changes_nothing(
    name, num_draft_tokens, plain, requests, make_engine, run, assert_same
):
    expected = {f"n{n}": plain(n, **SAMPLINGS[name]) for n in LENGTHS}
    proposer = NoisyTargetProposer(requests(), expected, scale=0.6)
    engine = make_engine(num_draft_tokens=num_draft_tokens, proposer=proposer)

    answers = run(engine, *requests(**SAMPLINGS[name]))

    for n in LENGTHS:
        assert_same(answers[f"n{n}"], expected[f"n{n}"])
    assert 0.3 <= proposer.first_draft_rate() <= 0.8
    assert engine.stats().num_steps < NUM_TOKENS


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [121, 122, 123, 124])
def test_rejection_at_every_offset_across_the_boundaries(
    length, wrong_at, plain, make_engine, make_request, run, assert_same
):
    sampling = SAMPLINGS["seeded"]
    expected = plain(length, **sampling)
    engine = make_engine(num_draft_tokens=4, proposer=WrongAtProposer(length, expected.token_ids, wrong_at))

    answer = run(engine, make_request("x", length, max_tokens=NUM_TOKENS, **sampling))["x"]

    assert_same(answer, expected)
    runs = [chunk for chunk in answer.chunks if chunk.num_drafted == 4]  # the last ones may have less room
    assert len(runs) >= 3
    assert all((run.num_accepted, len(run.token_ids)) == (wrong_at, wrong_at + 1) for run in runs)


def test_right_drafts_are_all_taken_and_never_go_past_the_limit(plain, make_engine, make_request, run, assert_same):
    expected = plain(30)
    engine = make_engine(num_draft_tokens=4, proposer=WrongAtProposer(30, expected.token_ids, wrong_at=None))

    answer = run(engine, make_request("x", 30, max_tokens=NUM_TOKENS))["x"]

    assert_same(answer, expected)
    assert [len(chunk.token_ids) for chunk in answer.chunks] == [1, 5, 5, 5, 4]
    assert [chunk.num_drafted for chunk in answer.chunks] == [0, 4, 4, 4, 3]
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 6])
def test_a_stop_token_inside_the_drafts_ends_the_answer_there(offset, plain, make_engine, make_request, run):
    token_ids = plain(30, **SAMPLINGS["seeded"]).token_ids
    stop = token_ids[offset]
    end = token_ids.index(stop) + 1
    engine = make_engine(num_draft_tokens=4, proposer=WrongAtProposer(30, token_ids, wrong_at=None))

    request = make_request("x", 30, max_tokens=NUM_TOKENS, token_ids=(stop,), **SAMPLINGS["seeded"])
    answer = run(engine, request)["x"]

    assert answer.token_ids == token_ids[:end] and len(answer.logprobs) == end
    assert (answer.finish_reason, answer.chunks[-1].stop_token_id) == (FinishReason.STOP, stop)
    assert answer.chunks[-1].num_accepted <= len(answer.chunks[-1].token_ids)
    assert engine.stats().num_running == 0


def test_min_tokens_counts_the_drafts_in_front(plain, make_engine, make_request, run):
    stop = plain(30).token_ids[1]
    request = make_request("x", 30, max_tokens=NUM_TOKENS, token_ids=(stop,), min_tokens=4)
    expected = run(make_engine(), request)["x"]

    proposer = WrongAtProposer(30, expected.token_ids, wrong_at=None)
    answer = run(make_engine(num_draft_tokens=4, proposer=proposer), request)["x"]

    assert answer.token_ids == expected.token_ids
    assert stop not in answer.token_ids[:4]


def test_drafts_count_against_the_token_budget_and_wait_for_nobody(plain, requests, make_engine, run, assert_same):
    engine = make_engine(num_draft_tokens=4, max_num_batched_tokens=16)
    for request in requests():
        engine.add(request)
    answers, num_mixed = {}, 0

    while engine.has_work():
        output = engine.step()
        assert output.num_tokens <= 16
        num_mixed += bool(output.chunks) and output.num_tokens > sum(1 + c.num_drafted for c in output.chunks)
        for chunk in output.chunks:
            answers.setdefault(chunk.request_id, []).extend(chunk.token_ids)

    assert num_mixed > 0  # answers were drafted while prompts were computed
    assert answers == {f"n{n}": plain(n).token_ids for n in LENGTHS}


def test_prompts_advance_beside_answers_that_draft(plain, make_engine, make_request):
    proposer = CountedProposer([[3, 3, 3, 3]])
    engine = make_engine(num_draft_tokens=4, max_num_batched_tokens=12, proposer=proposer, prefix_cache=False)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, 3, max_tokens=100))
    while engine.stats().total_drafted_tokens == 0:
        engine.step()
    engine.add(make_request("late", 30))

    # 12 tokens: 3 answers, 4 of the 9 to spare for drafts, 5 for the prompt.
    steps = [engine.step() for _ in range(6)]

    assert [chunk.request_id for chunk in steps[-1].chunks].count("late") == 1
    assert all(step.num_tokens == 12 for step in steps)


def test_preempted_sequences_end_as_if_undisturbed(make_engine, make_request, run, assert_same):
    requests = [make_request(f"r{n}", n, max_tokens=40, temperature=1.0, seed=n) for n in (220, 230, 240)]
    expected = {request.request_id: run(make_engine(), request)[request.request_id] for request in requests}
    engine = make_engine(num_pages=4, max_num_seqs=3, num_draft_tokens=3)

    crowded = run(engine, *requests)

    assert engine.stats().num_preemptions > 0
    for name, answer in expected.items():
        assert_same(crowded[name], answer)


def test_penalties_count_more_distinct_tokens_than_they_began_with(make_engine, make_request, run, assert_same):
    request = make_request("x", 20, temperature=1.5, seed=3, presence_penalty=2.0, max_tokens=80)

    drafted = run(make_engine(num_draft_tokens=4), request)["x"]

    assert len(set(drafted.token_ids)) > 64
    assert_same(drafted, run(make_engine(), request)["x"])


def test_a_decode_engine_drafts_for_an_answer_with_penalties(
    plain, make_engine, make_request, run, step_until_chunk, assert_same
):
    request = make_request("x", 30, **SAMPLINGS["edited"], max_tokens=NUM_TOKENS)
    prefill, decode = make_engine(num_draft_tokens=4), make_engine(num_draft_tokens=4)
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill)
    decode.import_sequence(request, first.token_ids[0], prefill.export_sequence("x").segments)

    answer = run(decode)["x"]
    answer.token_ids[:0], answer.logprobs[:0] = first.token_ids, first.logprobs

    assert sum(chunk.num_drafted for chunk in answer.chunks) > 0
    assert_same(answer, plain(30, **SAMPLINGS["edited"]))


def test_a_draft_that_breaks_the_logits_costs_nobody_anything(toy_model_mtp, plain, make_engine, make_request, run):
    expected = plain(30)
    request = make_request("x", 30, max_tokens=NUM_TOKENS)
    poison = next(t for t in range(16, 500) if t not in (*expected.token_ids, *request.prompt_token_ids))
    embedding = toy_model_mtp.model.embed.weight
    healthy = embedding[poison].clone()
    with torch.no_grad():
        embedding[poison] = float("nan")
    try:
        engine = make_engine(num_draft_tokens=2, proposer=CountedProposer([[poison, poison]]))
        answer = run(engine, request)["x"]
    finally:
        with torch.no_grad():
            embedding[poison] = healthy

    assert answer.token_ids == expected.token_ids
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_no_score_of_these_answers_is_a_near_tie(name, plain):
    """The two best scores of every token compared in this file are at least ten times the allowed difference apart."""
    gaps = []
    for n in LENGTHS:
        for i, entry in enumerate(plain(n, **SAMPLINGS[name]).logprobs):
            scores = torch.tensor([entry[t] for t in range(VOCABULARY)])
            if name == "seeded":
                seed = torch.tensor([SAMPLINGS[name]["seed"]])
                scores = scores + gumbel_noise(seed, torch.tensor([n + i]), VOCABULARY)[0]
            best, second = scores.topk(2).values.tolist()
            gaps.append(best - second)

    assert min(gaps) > 1e-3
