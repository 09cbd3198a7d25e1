"""Whatever arrives, is drafted, rejected, preempted or aborted: answers are plain ones and the accounts close."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.proposers import RandomProposer

LENGTHS = (5, 60, 118, 126)  # the last two cross t = 127 mod 128 and the end of the window
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def plain_answers() -> dict:
    """Plain answers by (length, temperature); filled on first use."""
    return {}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4, unique=True),
    temperature=st.sampled_from([0.0, 1.0]),
    num_draft_tokens=st.integers(1, 4),
    rate=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    budget=st.sampled_from([6, 20, 500]),
    num_pages=st.sampled_from([2, 3, 12]),
    abort_at=st.none() | st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_drafts_never_change_an_answer_nor_the_accounts(
    lengths,
    temperature,
    num_draft_tokens,
    rate,
    budget,
    num_pages,
    abort_at,
    seed,
    plain_answers,
    make_engine,
    run,
    make_request,
):
    requests = [make_request(f"n{n}", n, max_tokens=NUM_TOKENS, temperature=temperature, seed=n) for n in lengths]
    for n, request in zip(lengths, requests, strict=True):
        if (n, temperature) not in plain_answers:
            plain_answers[n, temperature] = run(make_engine(), request)[f"n{n}"].token_ids
    answers = {r.prompt_token_ids: plain_answers[n, temperature] for n, r in zip(lengths, requests, strict=True)}
    engine = make_engine(
        num_draft_tokens=num_draft_tokens,
        proposer=RandomProposer(answers, rate, seed),
        num_pages=num_pages,
        max_num_batched_tokens=budget,
    )
    for request in requests:
        engine.add(request)
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    aborted, num_steps = None, 0

    while engine.has_work():
        for chunk in engine.step().chunks:
            got[chunk.request_id] += chunk.token_ids
        num_steps += 1
        if num_steps == abort_at and engine.abort(requests[0].request_id):
            aborted = requests[0].request_id
        engine.check()

    for n in lengths:
        expected = plain_answers[n, temperature]
        name = f"n{n}"
        assert got[name] == (expected[: len(got[name])] if name == aborted else expected)
    assert engine.stats().free_pages == num_pages
