"""Golden completions: the message is the same for every way of cutting the output into tokens and chunks."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from dsv4_cluster.tokenizer.encoding import ChatPrompt
from tests.kit.answers import Answer, prompt_of, streamed_answer, whole_answer
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.golden_completions import MARK, Golden, golden_completions

GOLDENS = golden_completions()
NUM_RANDOM_CUTS = 8
NUM_PARTS = 16  # goldens of one test together: a test of its own for each would cost more than it tests


def pieces_of(text: str, cuts: Sequence[int]) -> list[int]:
    """Token ids of the pieces of a text, each encoded alone: special tokens do not survive a cut within."""
    bounds = [0, *sorted(cuts), len(text)]
    return [token_id for start, end in pairwise(bounds) for token_id in tokens_of(text[start:end])]


def message_of(answer: Answer) -> Answer:
    return {name: value for name, value in answer.items() if name not in ("usage", "logprobs")}


def streamed(golden: Golden, prompt: ChatPrompt, cuts: Sequence[int], rng: random.Random) -> Answer:
    ids = pieces_of(golden.output, cuts)
    groups = sorted(rng.sample(range(len(ids)), rng.randrange(len(ids)))) if rng.random() < 0.5 else ()
    return message_of(streamed_answer(prompt, chunks_of(ids, groups, finish=golden.ends_by)))


def expected_of(golden: Golden) -> Answer:
    """The message of the answer that is not streamed, once it has been found to be the golden one."""
    prompt = prompt_of(golden.request_fields)
    found = message_of(whole_answer(prompt, chunks_of(tokens_of(golden.output), finish=golden.ends_by)))
    calls = [[name, json.loads(arguments)] for name, arguments in found["tool_calls"]] if not golden.open_call else None
    assert (found["content"], found["reasoning_content"]) == (golden.content, golden.reasoning), golden.name
    assert calls == golden.calls if calls is not None else found["tool_calls"] == [golden.open_call], golden.name
    assert found["finish_reason"] == golden.finish, golden.name
    return found


def part(index: int) -> Iterator[tuple[Golden, ChatPrompt, Answer, random.Random]]:
    for number, golden in enumerate(GOLDENS[index::NUM_PARTS]):
        yield golden, prompt_of(golden.request_fields), expected_of(golden), random.Random(1000 * index + number)


def test_there_are_enough_goldens_and_none_shows_markup():
    assert len(GOLDENS) >= 200
    assert len({golden.name for golden in GOLDENS}) == len(GOLDENS)
    assert not [golden.name for golden in GOLDENS if MARK in golden.content + golden.reasoning]


@pytest.mark.parametrize("index", range(NUM_PARTS))
def test_goldens_hold_whole_character_by_character_and_for_random_cuts(index):
    for golden, prompt, expected, rng in part(index):
        text = golden.output
        cuts = [range(1, len(text)), ()]
        for _ in range(NUM_RANDOM_CUTS):
            cuts.append([rng.randrange(len(text))])
            cuts.append(rng.sample(range(len(text)), min(len(text), rng.randrange(2, 12))))
        for cut in cuts:
            assert streamed(golden, prompt, cut, rng) == expected, (golden.name, list(cut))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(NUM_PARTS))
def test_goldens_hold_for_every_single_cut_and_many_random_ones(index):
    for golden, prompt, expected, rng in part(index):
        text = golden.output
        many = [rng.sample(range(len(text)), rng.randrange(1, len(text))) for _ in range(32)]
        for cut in [*([index] for index in range(1, len(text))), *many]:
            assert streamed(golden, prompt, cut, rng) == expected, (golden.name, list(cut))
