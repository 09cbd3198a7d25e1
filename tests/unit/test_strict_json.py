"""JSON is read as every reader reads it, or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_cluster import strict_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_what_is_written_is_read(value, is_escaped):
    assert strict_json.loads(json.dumps(value, ensure_ascii=is_escaped)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not valid JSON"),
        ("{'a': 1}", "is not valid JSON"),
        ("NaN", "NaN is not a JSON value"),
        ("[-Infinity]", "-Infinity is not a JSON value"),
        ("1e400", "1e400 is too large"),
        ('{"a": -1.8e308}', "-1.8e308 is too large"),
        ("9" * 309, "309 characters, at most 308"),
        ("1" + "0" * 100_000, "100001 characters"),
        (r'"\ud800"', "half of a surrogate pair"),
        (r'{"\udc00\ud800": 1}', "half of a surrogate pair"),
        ("[" * 101 + "]" * 101, "at most 100 levels"),
        ('{"a":' * 101 + "1" + "}" * 101, "at most 100 levels"),
        ("[" * 100_000, "at most 100 levels"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_readers_disagree_about_is_refused_with_the_reason(text, words):
    with pytest.raises(ValueError, match=r"is not valid JSON|half of a surrogate|nested too deeply") as refusal:
        strict_json.loads(text)

    assert words in str(refusal.value)


@pytest.mark.parametrize("text", ["9" * 308, "1.7e308", "5e-324", "-0", r'"\ud83d\ude00"', "[" * 100 + "]" * 100])
def test_the_largest_that_is_read(text):
    assert strict_json.loads(text) == json.loads(text)
