"""Stop strings: found across pieces, cut from the text, the same for every way of cutting the stream."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.tokenizer.stop_text import StopText, StopTextStream
from tests.kit.codec import load_codec

LETTERS = st.text(alphabet="ab🎉", max_size=14)
TOKEN_IDS = {load_codec().text.token_bytes(i): i for i in range(load_codec().text.vocab_size)}
STOPS = st.lists(st.text(alphabet="ab🎉", min_size=1, max_size=4), max_size=3)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopText(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.is_stopped


@settings(deadline=None)
@given(text=LETTERS, stops=STOPS, data=st.data())
def test_the_result_does_not_depend_on_the_cuts(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]

    assert run(pieces, stops) == run([text], stops) == run(list(text), stops)


@settings(deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_the_shown_text_ends_before_the_stop_string_that_completes_first(text, stops):
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]

    shown, is_stopped = run(list(text), stops)

    assert is_stopped == bool(ends)
    if not ends:
        assert shown == text
        return
    longest = max(len(stop) for stop in stops if text[: min(ends)].endswith(stop))
    assert shown == text[: min(ends) - longest]
    assert not any(stop in shown for stop in stops)


def test_a_possible_beginning_is_held_back_and_then_released():
    matcher = StopText(["STOP"])

    assert [matcher.push(piece) for piece in ("a S", "TO", "X", "ST")] == ["a ", "", "STOX", ""]
    assert matcher.finish() == "ST"


def test_nothing_comes_after_a_stop():
    matcher = StopText(["x"])

    assert [matcher.push("axb"), matcher.push("c"), matcher.finish()] == ["a", "", ""]


@pytest.mark.parametrize("stop", ["🎉", "<think>", " two"])
def test_a_stop_string_inside_or_across_tokens_is_found(stop):
    codec = load_codec()
    stream = StopTextStream(codec.text, [stop])

    shown = "".join(stream.push(t) for t in codec.text.encode(f"one {stop} three"))

    assert stream.is_stopped
    assert shown + stream.finish() == f"one {stop} three".split(stop)[0]
    assert stream.num_released == len(shown)


@settings(deadline=None, max_examples=200)
@given(text=LETTERS, stops=STOPS, data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut_into_tokens(text, stops, data):
    """Tokens of single bytes cut characters and stop strings anywhere."""
    spelling, ids, start = text.encode(), [], 0
    while start < len(spelling):
        fitting = [
            spelling[start:end] for end in range(start + 1, len(spelling) + 1) if spelling[start:end] in TOKEN_IDS
        ]
        piece = data.draw(st.sampled_from(fitting))
        ids.append(TOKEN_IDS[piece])
        start += len(piece)
    stream = StopTextStream(load_codec().text, stops)

    shown = "".join([stream.push(token_id) for token_id in ids])
    shown += stream.finish()

    assert (shown, stream.is_stopped) == run(list(text), stops)


def test_a_half_character_at_the_end_is_flushed():
    codec = load_codec()
    stream = StopTextStream(codec.text, ["zz"])
    ids = codec.text.encode("a 🎉")[:-1]

    assert "".join(map(stream.push, ids)) + stream.finish() == "a �"
