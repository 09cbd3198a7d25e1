"""Sampling inside the engine: parameters reach the tokens, thoughts end in time, replicas and drafts agree."""

import dataclasses
import math

import pytest
import torch

from dsv4_cluster.engine.sampling_rows import SamplingRows
from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.output import FinishReason
from dsv4_cluster.sampling.batch import SamplingBatch
from dsv4_cluster.sampling.sampler import sample_tokens

PROMPT = list(range(30, 60))
EVERYTHING = {
    "temperature": 1.0,
    "seed": 9,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.001,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": ((44, 2.0), (45, -100.0)),
    "max_tokens": 24,
}


@pytest.fixture
def think(toy_model) -> int:
    """Id of </think>."""
    assert toy_model.think_end_token_id is not None
    return toy_model.think_end_token_id


def thinking(request, budget: int | None):
    return dataclasses.replace(request, thinking=True, thinking_budget=budget)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -2}, "top_k is -2, expected >= 1, or 0"),
        ({"min_p": 1.5}, "min_p is 1.5, expected 0 <= min_p <= 1"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2.5, expected -2..2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, expected 0.01..100"),
        ({"logit_bias": ((512, 1.0),)}, "logit_bias token id 512 is outside the vocabulary of 512"),
        ({"logit_bias": ((5, 101.0),)}, r"logit_bias of token 5 is 101.0, expected -100..100"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "2 entries for 1 token ids"),
        ({"min_tokens": 9}, "min_tokens is 9, expected 0 <= min_tokens <= max_tokens = 8"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_limit(fields, message, make_engine, make_request):
    with pytest.raises(InvalidRequestError, match=message):
        make_engine().add(make_request("bad", PROMPT, **fields))


@pytest.mark.parametrize(
    ("is_thinking", "budget", "message"), [(True, -1, "thinking_budget is -1"), (False, 5, "inside the thoughts")]
)
def test_a_thinking_budget_that_makes_no_sense_is_refused(is_thinking, budget, message, make_engine, make_request):
    request = dataclasses.replace(make_request("bad", PROMPT), thinking=is_thinking, thinking_budget=budget)

    with pytest.raises(InvalidRequestError, match=message):
        make_engine().add(request)


def test_penalties_keep_greedy_answers_from_repeating(make_engine, make_request, run):
    bias = tuple((token_id, 30.0) for token_id in (50, 51, 52))
    fields = {"logit_bias": bias, "max_tokens": 6, "prompt_logprobs": None}

    answers = run(
        make_engine(),
        make_request("free", PROMPT, **fields),
        make_request("penalised", [3, 4, 5], **fields | {"presence_penalty": 2.0, "frequency_penalty": 2.0}),
        make_request("repetition", PROMPT, **fields | {"repetition_penalty": 10.0, "logit_bias": ()}),
    )

    assert set(answers["free"].token_ids) <= {50, 51, 52}
    repeats = {name: len(answer.token_ids) - len(set(answer.token_ids)) for name, answer in answers.items()}
    assert repeats["penalised"] <= repeats["free"]
    assert repeats["repetition"] == 0
    assert not set(answers["repetition"].token_ids) & set(PROMPT)


def test_top_k_one_and_min_p_one_are_greedy(make_engine, make_request, run):
    answers = run(
        make_engine(),
        make_request("greedy", PROMPT),
        make_request("top_k", PROMPT, temperature=1.0, seed=1, top_k=1),
        make_request("min_p", PROMPT, temperature=1.0, seed=2, min_p=1.0),
    )

    assert answers["greedy"].token_ids == answers["top_k"].token_ids == answers["min_p"].token_ids


def test_a_seeded_answer_is_the_same_alone_in_a_batch_chunked_preempted_and_on_another_engine(
    make_engine, make_request, run, assert_same
):
    alone = run(make_engine(), make_request("it", PROMPT * 9, **EVERYTHING))["it"]
    chunked = run(make_engine(max_num_batched_tokens=64), make_request("it", PROMPT * 9, **EVERYTHING))["it"]
    crowd = [make_request(f"other-{i}", 200 + i, **EVERYTHING | {"seed": i}) for i in range(4)]
    tight = make_engine(num_pages=6)
    crowded = run(tight, *crowd, make_request("it", PROMPT * 9, **EVERYTHING))["it"]

    assert_same(chunked, alone)
    assert_same(crowded, alone)


def test_a_handed_over_sequence_goes_on_with_the_same_penalties(make_engine, make_request, run, step_until_chunk):
    request = make_request("it", PROMPT * 5, **EVERYTHING)
    whole = run(make_engine(), request)["it"].token_ids
    prefill, decode = make_engine(), make_engine()

    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill).token_ids[0]
    assert decode.import_sequence(request, first, prefill.export_sequence("it").segments)
    tokens = [first]
    while decode.has_work():
        tokens += [token_id for chunk in decode.step().chunks for token_id in chunk.token_ids]

    assert tokens == whole


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_of_thoughts_is_forced_when_the_budget_is_spent(budget, make_engine, make_request, run, think):
    request = make_request("it", PROMPT, max_tokens=9, logit_bias=((think, -100.0),))

    tokens = run(make_engine(), thinking(request, budget))["it"].token_ids

    assert [i for i, token_id in enumerate(tokens) if token_id == think] == [budget]
    assert len(tokens) == 9


def test_thoughts_that_end_in_time_are_left_alone(make_engine, make_request, run, think):
    request = make_request("it", PROMPT, max_tokens=9, logit_bias=((think, 100.0),))

    tokens = run(make_engine(), thinking(request, 5))["it"].token_ids

    assert tokens[0] == think
    assert tokens == run(make_engine(), request)["it"].token_ids


def test_eos_inside_budgeted_thoughts_ends_the_thoughts_and_not_the_answer(
    make_engine, make_request, run, think, toy_model
):
    eos = toy_model.config.eos_token_id
    request = make_request("it", PROMPT, max_tokens=9, ignore_eos=False, logit_bias=((eos, 100.0), (think, -100.0)))

    budgeted = run(make_engine(), thinking(request, 5))["it"]
    plain = run(make_engine(), dataclasses.replace(request, thinking=True))["it"]
    ignoring = run(
        make_engine(),
        thinking(dataclasses.replace(request, stop=dataclasses.replace(request.stop, ignore_eos=True)), 2),
    )["it"]

    assert budgeted.token_ids == [think, eos]
    assert budgeted.finish_reason is FinishReason.STOP
    assert plain.token_ids == [eos]
    assert ignoring.token_ids[:3] == [eos, eos, think]


def test_min_tokens_then_stop_then_max_tokens(make_engine, make_request, run):
    free = run(make_engine(), make_request("it", PROMPT, max_tokens=12))["it"].token_ids
    stop = {"token_ids": (free[2],), "max_tokens": 12}

    answers = run(
        make_engine(),
        make_request("stops", PROMPT, **stop),
        make_request("later", PROMPT, **stop, min_tokens=10),
        make_request("never", PROMPT, **stop, min_tokens=12),
    )

    assert answers["stops"].token_ids == free[: free.index(free[2]) + 1]
    assert free[2] not in answers["later"].token_ids[:10]
    assert free[2] not in answers["never"].token_ids
    assert len(answers["never"].token_ids) == 12
    assert answers["never"].finish_reason is FinishReason.LENGTH


def test_rows_behind_drafts_choose_what_plain_decoding_chooses(make_request, think):
    rows = SamplingRows(eos_token_id=1, think_end_token_id=think, device=torch.device("cpu"))
    logits = torch.randn(12, 512, generator=torch.Generator().manual_seed(5)) * 2
    few = tuple((token_id, 9.0) for token_id in (44, 46, 47))  # so few that they repeat, and penalties decide
    fields = EVERYTHING | {"logprobs": None, "max_tokens": 40, "logit_bias": few, "frequency_penalty": 2.0}
    request = thinking(make_request("it", PROMPT, ignore_eos=False, min_tokens=4, **fields), 6)
    plain = Sequence(request, list(PROMPT))
    for step in range(12):
        row = rows.row(plain)
        batch = SamplingBatch.build([row], logits.device)
        plain.token_ids.append(sample_tokens(logits[step : step + 1], batch).token_ids[0])
    answer = plain.token_ids[len(PROMPT) :]
    assert answer[6] == think or think in answer[:6]

    verified = Sequence(request, list(PROMPT))
    for start in range(0, 12, 4):
        drafts = answer[start : start + 4]
        batch = SamplingBatch.build([rows.row(verified, drafts[:i]) for i in range(4)], logits.device)
        assert sample_tokens(logits[start : start + 4], batch).token_ids == drafts
        verified.token_ids += drafts
