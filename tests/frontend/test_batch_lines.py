"""Lines of batch files, whatever is in them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from dsv4_cluster.frontend.batch_lines import MAX_FAULTS, answer_line, check_lines, unanswered_line

URL = "/v1/completions"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": JSON | st.text(min_size=1, max_size=5),
        "method": JSON | st.just("POST"),
        "url": JSON | st.just(URL),
        "body": JSON | st.dictionaries(st.sampled_from(["model", "stream", "background"]), JSON),
    },
).map(lambda line: json.dumps(line).encode())


def check(lines):
    return check_lines(enumerate(lines, start=1), URL, max_lines=10_000, max_body_bytes=1000)


@given(st.lists(st.binary(max_size=30) | ALMOST, min_size=1, max_size=8))
def test_a_file_is_valid_or_says_where_it_is_not(lines):
    num_lines, faults = check(lines)

    assert num_lines == len(lines)
    assert {fault.line for fault in faults} <= set(range(1, num_lines + 1))
    custom_ids = [json.loads(line)["custom_id"] for line in lines] if not faults else []
    assert len(set(custom_ids)) == len(custom_ids)


def test_the_number_of_reported_faults_and_the_length_of_a_line_are_bounded():
    num_lines, faults = check([b"x"] * 1000)
    _, [fault] = check([b" " * 6000 + b"{}"])

    assert (num_lines, len(faults)) == (MAX_FAULTS, MAX_FAULTS)
    assert fault.code == "line_too_long" and "6002 bytes" in fault.message and "is 1000" in fault.message


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), JSON)
def test_a_result_is_one_line_of_json(custom_id, body):
    text = json.dumps(body, indent=1)
    answer = answer_line(custom_id, status=200, request_id="req-1", body=b"\n" + text.encode() + b"\n")
    nothing = unanswered_line(custom_id, "batch_expired", custom_id)

    for line in (answer, nothing):
        assert line.text.endswith(b"\n") and line.text.count(b"\n") == 1
        assert json.loads(line.text)["custom_id"] == custom_id
    assert json.dumps(json.loads(answer.text)["response"]["body"]) == json.dumps(body)
    assert (answer.is_error, nothing.is_error) == (False, True)
    assert answer_line(custom_id, status=400, request_id="req-1", body=b"{}").is_error
