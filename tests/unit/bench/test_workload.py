import dataclasses

import pytest

from dsv4_cluster.bench.words import WORDS
from dsv4_cluster.bench.workload import WorkloadSpec, make_workload, warmup_workload
from dsv4_cluster.errors import ConfigError
from tests.kit.codec import load_codec

RANDOM = WorkloadSpec(kind="random", num_requests=40, input_tokens=60, output_tokens=20, range_ratio=0.5, seed=3)


def _lengths(workload):
    return [(turn.num_input_tokens, turn.num_output_tokens, turn.seed) for c in workload for turn in c.turns]


def _texts(workload):
    return [turn.text for conversation in workload for turn in conversation.turns]


def test_the_same_spec_gives_the_same_workload():
    assert make_workload(RANDOM) == make_workload(RANDOM)


def test_another_text_seed_changes_the_words_and_nothing_else():
    other = make_workload(dataclasses.replace(RANDOM, text_seed=1))

    assert _lengths(other) == _lengths(make_workload(RANDOM))
    assert not set(_texts(other)) & set(_texts(make_workload(RANDOM)))


def test_another_seed_changes_the_lengths():
    assert _lengths(make_workload(dataclasses.replace(RANDOM, seed=4))) != _lengths(make_workload(RANDOM))


def test_random_lengths_fill_their_range():
    lengths = _lengths(make_workload(dataclasses.replace(RANDOM, num_requests=2000)))

    assert {inputs for inputs, _, _ in lengths} == set(range(30, 61))
    assert {outputs for _, outputs, _ in lengths} == set(range(10, 21))


def test_every_word_is_one_token_wherever_it_stands():
    encode = load_codec().text.encode

    assert [word for word in WORDS if len(encode(f" {word}")) != 1] == []
    for turn in (turn for c in make_workload(RANDOM) for turn in c.turns):
        assert len(encode(turn.text)) == turn.num_input_tokens


def test_shared_prefixes_take_turns():
    spec = WorkloadSpec(kind="shared-prefix", num_requests=6, input_tokens=4, prefix_tokens=9, num_prefixes=2)

    prefixes = [conversation.prefix for conversation in make_workload(spec)]

    assert prefixes[0::2] == [prefixes[0]] * 3
    assert prefixes[1::2] == [prefixes[1]] * 3
    assert prefixes[0] != prefixes[1]
    assert len(prefixes[0].split()) == 9


@pytest.mark.parametrize("num_requests", [1, 4, 10])
def test_conversations_add_up_to_the_requests(num_requests):
    spec = WorkloadSpec(kind="multi-turn", num_requests=num_requests, num_turns=4)

    turns = [len(conversation.turns) for conversation in make_workload(spec)]

    assert sum(turns) == num_requests
    assert turns[:-1] == [4] * (len(turns) - 1)


def test_a_warmup_shares_no_text_with_the_run():
    spec = WorkloadSpec(kind="shared-prefix", num_requests=20, prefix_tokens=30, input_tokens=30)

    warmup, run = warmup_workload(spec, 20), make_workload(spec)

    assert not {c.prefix for c in warmup} & {c.prefix for c in run}
    assert not set(_texts(warmup)) & set(_texts(run))
    assert warmup_workload(spec, 0) == []


@pytest.mark.parametrize(
    "field",
    [{"num_requests": 0}, {"output_tokens": 0}, {"range_ratio": 0.0}, {"range_ratio": 1.5}, {"prefix_tokens": -1}],
)
def test_an_impossible_spec_is_refused_by_name(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        WorkloadSpec(**field)


def test_a_shared_prefix_workload_needs_a_prefix():
    with pytest.raises(ConfigError, match="prefix_tokens is 0"):
        WorkloadSpec(kind="shared-prefix")
