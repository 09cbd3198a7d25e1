"""Stop strings are looked for in the text that a client sees, and reasoning tokens are those that were generated."""

import random

import pytest

from dsv4_cluster.tokenizer.completion_output import CompletionOutput
from tests.kit.answers import Answer, prompt_of, streamed_answer, whole_answer
from tests.kit.codec import chunks_of, load_codec, tokens_of
from tests.kit.golden_completions import MARK

OFF = {"thinking": {"type": "disabled"}}
SHOWN = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "<｜begin▁of▁sentence｜>",
    "<｜place▁holder▁no▁7｜>",
    "<｜fim▁hole｜>",
)
PIECES = (*SHOWN, "a", "User", "｜>", " <", "think", "é🎉", "no")
MARKUP = (
    "<",
    "</",
    ">",
    "/",
    "｜",
    "|",
    MARK,
    "\n",
    "x",
    "é🎉",
    f"<{MARK}foo>",
    f"<{MARK}tool_calls>",
    f"</{MARK}invoke>",
)
NUM_RANDOM = 60


def by_character(text: str) -> list[int]:
    """Tokens that spell a text without special ones."""
    return [token_id for char in text for token_id in tokens_of(char)]


def answer(ids: list[int], **fields) -> Answer:
    """The whole answer, which the streamed one has to equal."""
    prompt = prompt_of(fields)
    found = whole_answer(prompt, chunks_of(ids))
    assert streamed_answer(prompt, chunks_of(ids)) == found
    assert streamed_answer(prompt, chunks_of(ids, [len(ids) // 2 + 1])) == found
    return found


def test_the_tokens_of_this_test_are_special_ones():
    assert set(SHOWN) <= set(load_codec().text.added_token_ids)
    assert all(len(tokens_of(text)) == 1 for text in SHOWN)


@pytest.mark.parametrize("special", SHOWN)
def test_a_stop_string_is_found_in_and_across_a_special_token(special):
    text = f"ab{special}cd"

    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            found = answer(tokens_of(text), stop=text[start:end], **OFF)
            assert (found["content"], found["finish_reason"]) == (text[: text.find(text[start:end])], "stop")


def test_a_stop_string_is_found_whichever_tokens_spell_the_text():
    for seed in range(NUM_RANDOM):
        rng = random.Random(seed)
        text = "".join(rng.choices(PIECES, k=rng.randrange(2, 8)))
        start = rng.randrange(len(text))
        stops = [text[start : start + rng.randrange(1, 6)], rng.choice(PIECES), "never"]

        as_special, as_plain = (answer(ids, stop=stops, **OFF) for ids in (tokens_of(text), by_character(text)))

        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        _, start = min(ends)  # the first one to end; of several, the longest
        assert as_special["content"] == as_plain["content"] == text[:start], (text, stops)


@pytest.mark.parametrize("stops", [["c", "bc", "abcd"], ["abcd", "bc", "c"]])
@pytest.mark.parametrize("text", ["xabcd", "xab<think>", "x<think>bc"])
def test_of_stop_strings_that_end_together_the_longest_cuts_a_chat_and_a_completion(text, stops):
    stops = [stop.replace("c", "<think>") if "c" not in text else stop for stop in stops]
    completion = CompletionOutput(load_codec().text, stops, num_logprobs=None)
    shown = "".join(completion.push(chunk).text for chunk in chunks_of(tokens_of(text)))
    end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
    longest = max(len(stop) for stop in stops if text[:end].endswith(stop))

    assert longest > 1
    assert answer(tokens_of(text), stop=stops, **OFF)["content"] == shown == text[: end - longest]


def test_special_tokens_keep_their_logprobs_unless_a_stop_string_may_be_in_them():
    ids = tokens_of("a<｜User｜>b")

    def shown(stop: str) -> list[str]:
        prompt = prompt_of({"logprobs": True, "stop": stop, **OFF})
        entries = whole_answer(prompt, chunks_of(ids, with_logprobs=True))["logprobs"]["content"]
        return [entry["token"] for entry in entries]

    assert shown("zz") == ["a", "<｜User｜>", "b"]
    assert shown("Users") == ["a", "<｜User｜>", "b"]
    assert shown("｜>c") == ["a", "b"]


def test_stop_strings_are_not_looked_for_in_thoughts_and_removed_markup():
    text = f"hm<｜User｜></think>a<{MARK}foo>b<｜User｜>c"

    found = answer(tokens_of(text), stop=["<｜User｜>", "foo"])

    assert (found["reasoning_content"], found["content"]) == ("hm<｜User｜>", "ab")
    assert answer(tokens_of(text), stop="ab")["content"] == ""  # what the client sees


def test_every_token_before_the_end_of_the_thoughts_is_a_reasoning_token():
    for seed in range(NUM_RANDOM):
        rng = random.Random(seed)
        thoughts = "".join(rng.choices(MARKUP, k=rng.randrange(1, 9)))
        for spell in (tokens_of, by_character):
            ids = [*spell(thoughts), *spell("</think>ok")]

            found = answer(ids)

            usage = found["usage"]
            assert found["content"] == "ok", thoughts
            assert usage["completion_tokens_details"] == {"reasoning_tokens": len(spell(thoughts))}, thoughts
            assert usage["completion_tokens"] == len(ids)


def test_thoughts_that_a_call_ends_are_counted_up_to_its_block():
    tools = [{"type": "function", "function": {"name": "f"}}]
    thoughts = f"Hm <{MARK}foo> so\n\n"
    block = f'<{MARK}tool_calls>\n<{MARK}invoke name="f">\n</{MARK}invoke>\n</{MARK}tool_calls>'

    usage = answer(tokens_of(thoughts + block), tools=tools)["usage"]

    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(tokens_of(thoughts))}


@pytest.mark.parametrize("text", ["Hello", ""])
def test_an_answer_without_thoughts_has_no_reasoning_tokens(text):
    assert answer(tokens_of(text), **OFF)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
