"""Golden completions, damaged at random: no tag is ever shown, arguments always parse, cuts do not matter."""

import json
import random

import pytest

from dsv4_cluster.protocol.output import FinishReason
from dsv4_cluster.tokenizer.dsml_tags import parse_tag
from tests.kit.answers import Answer, prompt_of, streamed_answer, whole_answer
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.golden_completions import MARK, golden_completions

PARTS = (
    *("<", "</", ">", "/", "｜", "|", "DSML", MARK, "\n", " ", '"', "=", "x", "é", "🎉", "<invoke", "</parameter>"),
    *("<think>", "</think>", f"<{MARK}tool_calls>", f"</{MARK}tool_calls>", f'<{MARK}invoke name="run">'),
    *(f"</{MARK}invoke>", f'<{MARK}parameter name="cmd" string="true">', f"</{MARK}parameter>"),
)


def damaged(text: str, rng: random.Random) -> str:
    """Cut, inserted, repeated and exchanged pieces."""
    for _ in range(rng.randrange(1, 5)):
        at, kind = rng.randrange(len(text) + 1), rng.randrange(4)
        if kind == 0:
            text = text[:at] + text[at + rng.randrange(1, 12) :]
        elif kind == 1:
            text = text[:at] + rng.choice(PARTS) + text[at:]
        elif kind == 2:
            start = rng.randrange(len(text) + 1)
            text = text[:at] + text[start : start + rng.randrange(40)] + text[at:]
        else:
            text = text.replace(rng.choice(PARTS), rng.choice(PARTS), rng.randrange(1, 3))
    return text or "x"


def shows_a_tag(text: str) -> bool:
    """Half a mark at the end is none: what would complete it never came."""
    text += " "
    starts = (at for at, char in enumerate(text) if char in "<｜")
    return any(parse_tag(text, at, is_last=True, takes_unmarked=False) is not None for at in starts)


def message_of(answer: Answer) -> Answer:
    return {name: value for name, value in answer.items() if name not in ("usage", "logprobs")}


def check(seed: int) -> None:
    rng = random.Random(seed)
    golden = rng.choice(golden_completions())
    text = damaged(golden.output, rng)
    finish = rng.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
    prompt = prompt_of(golden.request_fields)

    found = message_of(whole_answer(prompt, chunks_of(tokens_of(text), finish=finish)))

    assert not shows_a_tag(found["content"]) and not shows_a_tag(found["reasoning_content"]), (text, found)
    if found["finish_reason"] != "length":
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in found["tool_calls"]), (text, found)
    cut = rng.randrange(len(text))
    in_two = tokens_of(text[:cut]) + tokens_of(text[cut:])
    for ids in ([token_id for char in text for token_id in tokens_of(char)], in_two):
        assert message_of(streamed_answer(prompt, chunks_of(ids, finish=finish))) == found, text


def test_damaged_completions_keep_the_promises():
    for seed in range(120):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_damaged_completions_keep_the_promises(part):
    for seed in range(1000 * (part + 1), 1000 * (part + 2)):
        check(seed)
