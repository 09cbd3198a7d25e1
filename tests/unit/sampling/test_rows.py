"""Rows with bias, penalties, masks and drafts: alone as in a batch, with drafts as if they were final tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.protocol.request import SamplingParams
from dsv4_cluster.sampling.batch import SamplingBatch, SamplingRow
from dsv4_cluster.sampling.processors import LogitEdits, TokenCounts
from dsv4_cluster.sampling.sampler import SampledTokens, sample_tokens

CPU = torch.device("cpu")
VOCAB = 90
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | fields)


def edits_of(sampling: SamplingParams, prompt=(), generated=()) -> LogitEdits | None:
    edits = LogitEdits.create(sampling, prompt, CPU)
    for token_id in generated if edits else ():
        edits.add(token_id)
    return edits


def sampled(logits: torch.Tensor, *rows: SamplingRow) -> SampledTokens:
    return sample_tokens(logits, SamplingBatch.build(rows, CPU))


def some_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


@settings(max_examples=80, deadline=None)
@given(prompt=tokens, generated=st.lists(st.integers(0, VOCAB - 1), max_size=150), drafts=tokens)
def test_counts_hold_the_prompt_at_zero_and_count_what_was_generated(prompt, generated, drafts):
    counts = TokenCounts(prompt, CPU)
    for token_id in generated:
        counts.add(token_id)

    for extra in (drafts, []):  # drafts are counted for the call only
        token_ids, values = counts.entries(extra)
        found = dict(zip(token_ids.tolist(), values.tolist(), strict=True))
        text = generated + extra
        assert found == {token_id: text.count(token_id) for token_id in {*prompt, *text}}
        assert len(token_ids) == len(found)


def test_a_row_that_changes_nothing_has_no_edits_and_its_batch_no_steps():
    assert edits_of(params(temperature=0.7, top_p=0.5)) is None

    batch = SamplingBatch.build([SamplingRow(params(), 3)], CPU)

    absent = ("top_k", "min_p", "bans", "bias", "counts", "penalties", "masks", "forced_token_ids", "replaced_tokens")
    assert all(getattr(batch, name) is None for name in absent)


def test_repetition_counts_the_prompt_and_the_others_only_what_was_generated():
    logits = torch.zeros(3, 4)
    logits[:, 1], logits[:, 2] = 1.0, 0.9
    rows = [
        SamplingRow(sampling, 5, edits=edits_of(sampling, prompt=[1]))
        for sampling in (params(repetition_penalty=1.5), params(presence_penalty=2.0), params(frequency_penalty=2.0))
    ]

    assert sampled(logits, *rows).token_ids == [2, 1, 1]


@pytest.mark.parametrize("kind", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_each_penalty_makes_a_generated_token_less_probable(kind):
    logits = torch.zeros(1, 4)
    logits[0, 1], logits[0, 2] = 1.0, 0.9
    sampling = params(**{kind: 1.3})

    assert sampled(logits, SamplingRow(sampling, 5, edits=edits_of(sampling, generated=[1]))).token_ids == [2]


def varied_rows() -> list[SamplingRow]:
    mask = torch.tensor([-1, 0, 0b1011], dtype=torch.int32)
    fields = [
        {},
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.4},
        {"temperature": 0.8, "logit_bias": ((7, 3.0), (8, -100.0)), "frequency_penalty": 0.7},
        {"temperature": 1.2, "min_p": 0.1, "presence_penalty": -1.0},
        {"temperature": 1.0, "top_p": 0.6},
    ]
    rows = []
    for i, each in enumerate(fields):
        sampling = params(seed=100 + i, logprobs=2, **each)
        edits = edits_of(sampling, prompt=[1, 2, 3], generated=[4, 4, 5][:i])
        rows.append(SamplingRow(sampling, 9 + i, banned_token_ids=(40,) * (i % 2), edits=edits))
    rows.append(SamplingRow(params(temperature=1.0, seed=5, logprobs=1), 3, allowed_mask=mask))
    rows.append(SamplingRow(params(logprobs=1), 3, forced_token_id=11))
    return rows


def test_every_row_is_sampled_in_a_batch_as_it_is_alone():
    rows, logits = varied_rows(), some_logits(7)

    together = sampled(logits, *rows)

    for i, row in enumerate(rows):
        alone = sampled(logits[i : i + 1], row)
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_logprobs_are_those_of_the_model_and_the_logits_stay_as_they_were():
    logits = some_logits(7)
    before = logits.clone()

    result = sampled(logits, *varied_rows())

    assert torch.equal(logits, before)
    exact = torch.log_softmax(before, -1)
    for row, (token_id, entry) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        assert math.isclose(entry[token_id], exact[row, token_id].item(), abs_tol=1e-6)


@settings(max_examples=50, deadline=None)
@given(prompt=tokens, text=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=8), data=st.data())
def test_a_row_behind_drafts_is_the_row_of_a_sequence_that_has_them(prompt, text, data):
    cut = data.draw(st.integers(0, len(text)))
    sampling = params(temperature=1.0, seed=4, repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.4)
    logits = some_logits(1)

    drafted = SamplingRow(sampling, 20, edits=edits_of(sampling, prompt, text[:cut]), draft_token_ids=tuple(text[cut:]))
    final = SamplingRow(sampling, 20, edits=edits_of(sampling, prompt, text))

    one, other = (SamplingBatch.build([row], CPU).counts for row in (drafted, final))
    as_dict = [dict(zip(c.token_ids.tolist(), c.values.tolist(), strict=True)) for c in (one, other)]
    assert as_dict[0] == as_dict[1]
    assert sampled(logits, drafted).token_ids == sampled(logits, final).token_ids


@settings(max_examples=50, deadline=None)
@given(allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1), seed=st.integers(0, 2**40), greedy=st.booleans())
def test_a_masked_row_takes_an_allowed_token(allowed, seed, greedy):
    words = [sum(1 << (t % 32) for t in allowed if t // 32 == w) for w in range(3)]
    mask = torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32)
    sampling = params(temperature=0.0 if greedy else 2.0, seed=seed, top_p=0.9, logit_bias=((3, 100.0),))
    row = SamplingRow(sampling, 5, banned_token_ids=(1,), edits=edits_of(sampling), allowed_mask=mask)

    token_id = sampled(some_logits(1), row).token_ids[0]

    assert token_id in allowed
    assert token_id != 1 or allowed == {1}


def test_a_replaced_token_is_replaced_only_when_drawn():
    logits = torch.zeros(2, 5)
    logits[0, 1], logits[1, 2] = 5.0, 5.0
    rows = [SamplingRow(params(logprobs=0), 4, replaced_token=(1, 3))] * 2

    result = sampled(logits, *rows)

    assert result.token_ids == [3, 2]
    assert list(result.logprobs[0]) == [3]
