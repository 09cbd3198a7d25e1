"""Whatever is posted, the answer is 200 or a 4xx in the envelope: never a 500, never a hang."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.kit.scripted_router import router_process


def _words(text: str) -> list[str]:
    return text.split()


MODEL = "deepseek-v4-flash"
USER = [{"role": "user", "content": "hi"}]
GOOD = {
    "/v1/chat/completions": {"model": MODEL, "messages": USER},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/messages": {"model": MODEL, "messages": USER, "max_tokens": 9},
    "/v1/responses": {"model": MODEL, "input": "hi"},
}
PATHS = tuple(GOOD)
FIELDS = _words(
    "model messages prompt stream stream_options max_tokens max_completion_tokens temperature top_p seed stop logprobs "
    "top_logprobs tools tool_choice thinking reasoning_effort response_format n user metadata echo "
    "top_k min_p presence_penalty repetition_penalty logit_bias min_tokens stop_token_ids ignore_eos "
    "thinking_token_budget system stop_sequences output_config output_format input instructions max_output_tokens "
    "text reasoning include store background previous_response_id parallel_tool_calls safety_identifier"
)
WORDS = st.sampled_from(
    [
        "",
        MODEL,
        *_words(
            "user assistant tool system text function enabled auto hi input_text output_text tool_use tool_result "
            "thinking function_call function_call_output reasoning message namespace custom allowed_tools any required "
            "json_schema object integer string array"
        ),
    ]
)
KEYS = st.sampled_from(
    _words(
        "role content type text function name parameters arguments tool_calls tool_call_id id prefix reasoning_content "
        "strict include_usage image_url url json_schema schema regex input output call_id tool_use_id input_schema "
        "format effort user_id budget_tokens summary tools mode properties items anyOf enum const minimum maximum"
    )
)
NUMBERS = st.sampled_from([0, 1, -1, 1.5, 2**31, 2**63, -(2**63), 2**80, 1e300, 10**400])
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": WORDS, "content": VALUES}, optional={"tool_calls": VALUES}), max_size=3
)
BODIES = st.fixed_dictionaries(
    {"model": st.just(MODEL)},
    optional={name: MESSAGES if name in ("messages", "input") else VALUES for name in FIELDS if name != "model"},
)
ANY_BODY = st.one_of(
    BODIES.map(lambda body: lambda _: json.dumps(body).encode()),
    st.tuples(st.sampled_from(FIELDS), VALUES).map(
        lambda broken: lambda path: json.dumps(GOOD[path] | {broken[0]: broken[1]}).encode()
    ),
    (st.binary(max_size=200) | st.text(max_size=100).map(str.encode)).map(lambda content: lambda _: content),
)
NUM_BODIES = 10_000
GROWTH_BYTES = 16 << 20  # of the server's memory over the second half of them
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def assert_answered(response) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        of_messages = response.request.url.path == "/v1/messages"
        assert sorted(response.json()["error"]) == (
            ["message", "type"] if of_messages else ["code", "message", "param", "type"]
        )


@pytest.mark.parametrize("path", PATHS)
@SETTINGS
@given(body=BODIES)
def test_a_json_object_of_plausible_fields_never_gives_500(http, path, body):
    assert_answered(http.post(path, content=json.dumps(body).encode()))


@pytest.mark.parametrize("path", PATHS)
@SETTINGS
@given(field=st.sampled_from(FIELDS), value=VALUES)
def test_one_broken_field_in_a_good_body_never_gives_500(http, path, field, value):
    assert_answered(http.post(path, content=json.dumps(GOOD[path] | {field: value}).encode()))


@pytest.mark.parametrize("path", PATHS)
@SETTINGS
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_arbitrary_bytes_are_400(http, path, content):
    response = http.post(path, content=content)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        rb'{"\ud800": 1}',
        rb'{"model": "\ud800"}',
        rb'{"model": "deepseek-v4-flash", "prompt": "\uDFFF"}',
        rb'{"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": "hi"}], "thinking": {"\ud800": 1}}',
    ],
)
def test_half_of_a_surrogate_pair_is_400(http, path, body):
    response = http.post(path, content=body)

    assert response.status_code == 400
    assert "surrogate pair" in response.json()["error"]["message"]


def test_an_escaped_surrogate_pair_is_text(http):
    response = http.post("/v1/completions", content=rb'{"model": "deepseek-v4-flash", "prompt": "\ud83d\ude00"}')

    assert response.status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_bodies_leave_the_server_as_it_was(tmp_path, record_property):
    num_asked, half_way = 0, 0
    rounds = settings(
        max_examples=NUM_BODIES // 10,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )

    with router_process(tmp_path) as router, httpx.Client(base_url=router.url, timeout=20) as http:

        def ask(path, body_for):
            nonlocal num_asked, half_way
            assert_answered(http.post(path, content=body_for(path)))
            num_asked += 1
            if num_asked == NUM_BODIES // 2:
                half_way = router.resident_bytes()

        number = 0
        while num_asked < NUM_BODIES:
            seed(number)(rounds(given(path=st.sampled_from(PATHS), body_for=ANY_BODY)(ask)))()
            number += 1
        grown = router.resident_bytes() - half_way

    record_property("grown_bytes", grown)
    assert grown < GROWTH_BYTES, f"{grown} bytes more than after {NUM_BODIES // 2} of {num_asked} bodies"
