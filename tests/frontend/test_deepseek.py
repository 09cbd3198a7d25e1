"""What clients of DeepSeek's hosted API rely on: thinking, effort, prefix completion, cache usage, user isolation."""

import httpx
import pytest

from dsv4_cluster.config.api_config import ApiConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, NAMES, chunks_of, load_codec, tokens_of
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService, says

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
OFF = {"thinking": {"type": "disabled"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "x"}


def post(http, **fields) -> dict:
    response = http.post(CHAT, json={"model": NAMES[0], "messages": [HI], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_text(service, index: int = -1) -> str:
    return load_codec().text.decode(service.requests[index].prompt_token_ids)


def test_effort_levels_map_as_the_hosted_api_maps_them(http, service):
    levels = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    for level in levels:
        post(http, reasoning_effort=level)
    post(http)

    prompts = dict(zip([*levels, "default"], (r.prompt_token_ids for r in service.requests), strict=True))
    assert [request.thinking for request in service.requests] == [False, *[True] * 7]
    assert prompts["minimal"] == prompts["low"]
    assert prompts["medium"] == prompts["high"] == prompts["xhigh"] == prompts["default"]
    assert len(prompts["none"]) == len(prompts["low"]) < len(prompts["high"]) < len(prompts["max"])


def test_the_thinking_object_wins_over_the_effort(http, service):
    post(http, thinking={"type": "disabled"}, reasoning_effort="max")
    post(http, thinking={"type": "enabled"}, reasoning_effort="none")
    post(http, thinking={"type": "adaptive"})

    assert [request.thinking for request in service.requests] == [False, True, True]


def test_a_tool_turn_may_come_back_without_its_thoughts(http, service):
    post(http, messages=[HI, CALLED, RESULT], tools=[TOOL])
    post(http, messages=[HI, {**CALLED, "reasoning_content": ""}, RESULT], tools=[TOOL])
    post(http, messages=[HI, {**CALLED, "reasoning_content": "Hm."}, RESULT], tools=[TOOL])

    assert prompt_text(service, 0) == prompt_text(service, 1)
    assert "<think>Hm.</think>" in prompt_text(service, 2)


def test_the_message_of_an_answer_is_accepted_as_history(client, service):
    service.script = says('Hm.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n')
    ask = {"model": NAMES[0], "tools": [TOOL]}
    message = client.chat.completions.create(messages=[HI], **ask).choices[0].message
    result = {**RESULT, "tool_call_id": message.tool_calls[0].id}

    for history in (message.model_dump(), message.model_dump(exclude_none=True)):
        client.chat.completions.create(messages=[HI, history, result], **ask)

    assert "<think>Hm.</think>" in prompt_text(service)
    assert service.requests[1].prompt_token_ids == service.requests[2].prompt_token_ids


@pytest.mark.parametrize(
    ("message", "fields", "end", "thinks"),
    [
        ({"content": "Sure, "}, OFF, "<｜Assistant｜></think>Sure, ", False),
        ({"content": "Sure, "}, {}, "<｜Assistant｜><think></think>Sure, ", False),
        ({"content": "So", "reasoning_content": "Hm."}, {}, "<｜Assistant｜><think>Hm.</think>So", False),
        ({"content": "", "reasoning_content": "Hm"}, {}, "<｜Assistant｜><think>Hm", True),
        ({"content": None, "reasoning_content": "Hm"}, {}, "<｜Assistant｜><think>Hm", True),
    ],
)
def test_a_prefix_message_is_continued(http, service, message, fields, end, thinks):
    service.script = says(" and on</think> we go" if thinks else "and on")

    body = post(http, messages=[HI, {"role": "assistant", "prefix": True, **message}], **fields)

    answer = body["choices"][0]["message"]
    assert prompt_text(service).endswith(end)
    assert service.requests[0].thinking is thinks
    assert answer["content"] == (" we go" if thinks else "and on")
    assert (answer.get("reasoning_content") or "") == (" and on" if thinks else "")


def test_a_prefix_message_has_to_be_the_last_one(http, service):
    messages = [HI, {"role": "assistant", "content": "a", "prefix": True}, HI]

    response = http.post(CHAT, json={"model": NAMES[0], "messages": messages})

    assert response.status_code == 400 and "prefix" in response.json()["error"]["message"]


def test_usage_tells_cached_prompt_tokens_and_thoughts(http, service):
    service.script = lambda _: chunks_of(tokens_of("Let me see.</think>42"), num_cached_tokens=3)

    usage = post(http)["usage"]

    assert usage["prompt_cache_hit_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 3
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokens_of("Let me see."))
    assert usage["completion_tokens"] == len(tokens_of("Let me see.</think>42"))


@pytest.mark.parametrize("thoughts", ["strawberry", "a < b </thi", "é🎉", f"Hm <{'｜DSML｜'}foo> so"])
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_counted_in_the_tokens_that_the_model_chose(client, service, thoughts, stream):
    ids = [token_id for char in thoughts for token_id in tokens_of(char)]  # not as the tokenizer would split them
    service.script = lambda _: chunks_of([*ids, *tokens_of("</think>42")])

    chat = client.chat.completions.create(
        model=NAMES[0], messages=[HI], stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    usage = list(chat)[-1].usage if stream else chat.usage
    response = client.responses.create(model=NAMES[0], input="hi", stream=stream)
    of_response = (list(response)[-1].response if stream else response).usage

    assert usage.completion_tokens_details.reasoning_tokens == len(ids)
    assert of_response.output_tokens_details.reasoning_tokens == len(ids)
    assert usage.completion_tokens == of_response.output_tokens == len([*ids, *tokens_of("</think>42")])


def test_end_users_are_kept_apart(http, service):
    post(http, user_id="ann")
    post(http, user_id="bob", priority=7)
    post(http)

    labels = [(request.tenant, request.cache_salt, request.priority) for request in service.requests]
    assert labels == [("/ann", "ann", 0), ("/bob", "bob", 7), ("", "", 0)]


def test_the_fingerprint_is_on_answers_and_chunks(client, service):
    ask = {"model": NAMES[0], "messages": [HI], "seed": 3}

    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(stream=True, **ask))
    text = client.completions.create(model=NAMES[0], prompt="hi")

    found = {whole.system_fingerprint, text.system_fingerprint, *(chunk.system_fingerprint for chunk in chunks)}
    assert found == {"fp_tests"}


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required"}])
def test_no_parallel_calls_means_one_call(http, service, fields):
    invoke = '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n'
    block = f"\n\n<｜DSML｜tool_calls>\n{invoke}{invoke}</｜DSML｜tool_calls>"
    service.script = says(f"Hm.</think>{block}")

    one = post(http, tools=[TOOL], parallel_tool_calls=False, **fields)
    two = post(http, tools=[TOOL], parallel_tool_calls=True, **fields)

    assert [len(body["choices"][0]["message"]["tool_calls"]) for body in (one, two)] == [1, 2]
    assert [request.structured.is_single_call for request in service.requests] == [True, False]


@pytest.mark.parametrize(("rule", "expected"), [("official", (1.0, 1.0)), ("request", (0.3, 0.8))])
def test_sampling_while_thinking_follows_the_configured_rule(rule, expected):
    service = ScriptedService()
    config = RouterConfig(api=ApiConfig(sampling_while_thinking=rule))
    app = create_app(service, load_codec(), config, max_model_len=CONTEXT_LIMIT)
    body = {"model": NAMES[0], "messages": [HI]}

    with serving(app) as url:
        for fields in ({"temperature": 0.3, "top_p": 0.8}, {}, {"temperature": 0.3, "top_p": 0.8, **OFF}):
            assert httpx.post(url + CHAT, json=body | fields).status_code == 200

    found = [value for r in service.requests for value in (r.sampling.temperature, r.sampling.top_p)]
    assert found == pytest.approx([*expected, 1.0, 1.0, 0.3, 0.8])
