"""`/v1/messages` through Anthropic's public client."""

import json

import anthropic
import pytest

from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.output import FinishReason
from tests.kit.codec import chunks_of, load_codec, tokens_of
from tests.kit.scripted_service import HANG, says

MODEL = "deepseek-v4-flash"
HI = [{"role": "user", "content": "hi"}]
OFF = {"type": "disabled"}
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def ask(claude, **fields):
    body = {"model": MODEL, "messages": HI, "max_tokens": 100, "thinking": OFF, **fields}
    return claude.messages.create(**body)


def test_a_whole_answer_has_text_stop_reason_and_usage(claude, service):
    service.script = lambda _: chunks_of(tokens_of("Good morning"), num_cached_tokens=2)

    answer = ask(claude)

    assert [block.text for block in answer.content] == ["Good morning"]
    assert (answer.role, answer.type, answer.model, answer.stop_reason) == ("assistant", "message", MODEL, "end_turn")
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.input_tokens + 2 == len(service.requests[0].prompt_token_ids)
    assert answer.usage.output_tokens == len(tokens_of("Good morning"))
    assert answer.id == service.requests[0].request_id
    assert answer._request_id.replace("req-", "msg_") == answer.id


def test_stream_events_come_in_the_documented_order(claude, service):
    service.script = says("hm</think>Sure." + CALL)

    events = list(ask(claude, stream=True, thinking={"type": "adaptive"}, tools=[WEATHER]))

    shape = [(event.type, getattr(event, "index", None)) for event in events]
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert shape[0][0] == "message_start"
    assert [kind for kind, _ in shape[-2:]] == ["message_delta", "message_stop"]
    assert starts == ["thinking", "text", "tool_use"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    for index in range(3):
        block = [kind for kind, at in shape if at == index]
        assert (block[0], block[-1]) == ("content_block_start", "content_block_stop")
        assert set(block[1:-1]) == {"content_block_delta"}
    assert events[-2].delta.stop_reason == "tool_use"


def test_a_streamed_message_equals_the_whole_one(claude, service):
    service.script = says("Let me see.</think>One 🎉 drei 四" + CALL)
    fields = {"model": MODEL, "messages": HI, "max_tokens": 2000, "tools": [WEATHER]}

    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()

    def facts(message):
        blocks = [block.model_dump(exclude={"id", "signature", "caller"}) for block in message.content]
        return blocks, message.stop_reason, message.usage.model_dump()

    assert facts(streamed) == facts(whole)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[2].input == {"city": "Paris"}


def test_a_ping_event_is_on_the_wire(http, service):
    body = {"model": MODEL, "messages": HI, "max_tokens": 9, "thinking": OFF, "stream": True}

    answer = http.post("/v1/messages", json=body)

    names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-1] == "message_stop" and "[DONE]" not in answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")


def test_tool_results_go_back_to_the_model(claude, service):
    turns = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}],
        },
    ]

    ask(claude, messages=turns, tools=[{**WEATHER, "type": "custom"}], thinking={"type": "adaptive"})

    prompt = load_codec().text.decode(service.requests[0].prompt_token_ids)
    assert "<think>hm</think>" in prompt and "sunny" in prompt and "opaque" not in prompt


@pytest.mark.parametrize("thinking", [OFF, {"type": "adaptive"}])
@pytest.mark.parametrize(
    ("choice", "kind", "num_tools"),
    [
        ({"type": "auto"}, "tool_call", 2),
        ({"type": "any"}, "tool_call_required", 2),
        ({"type": "tool", "name": "b"}, "tool_call_required", 1),
    ],
)
def test_a_tool_choice_constrains_the_answer_also_while_thinking(claude, service, thinking, choice, kind, num_tools):
    tools = [WEATHER, {"name": "b", "input_schema": {"type": "object"}}]

    ask(claude, tools=tools, tool_choice=choice, thinking=thinking)

    spec = service.requests[0].structured
    assert (spec.kind, len(json.loads(spec.schema)), spec.is_single_call) == (kind, num_tools, False)
    assert service.requests[0].thinking == (thinking is not OFF)


def test_parallel_tool_use_can_be_switched_off(claude, service):
    ask(claude, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})

    assert service.requests[0].structured.is_single_call


def test_no_tool_choice_takes_the_tools_out_of_the_prompt(claude, service):
    ask(claude, tools=[WEATHER], tool_choice={"type": "none"})

    assert service.requests[0].structured is None
    assert "get_weather" not in load_codec().text.decode(service.requests[0].prompt_token_ids)


def test_a_strict_tool_is_constrained_by_its_own_schema(claude, service):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "enum": [1, 2]}}, "required": ["n"]}

    ask(claude, tools=[{"name": "pick", "input_schema": schema, "strict": True}])

    function = json.loads(service.requests[0].structured.schema)[0]["function"]
    assert function["strict"] is True
    assert function["parameters"] == {**schema, "additionalProperties": False}


def test_the_thinking_budget_and_sampling_values_reach_the_service(claude, service):
    ask(
        claude,
        thinking={"type": "enabled", "budget_tokens": 1024},
        max_tokens=2000,
        extra_body={"top_k": 5, "seed": 7},
        stop_sequences=["END"],
    )
    ask(claude, extra_body={"temperature": 0.25, "top_p": 0.5})

    first, second = service.requests
    assert (first.thinking_budget, first.sampling.max_tokens, first.sampling.top_k) == (1024, 2000, 5)
    assert (first.sampling.seed, first.stop.strings) == (7, ("END",))
    assert (second.sampling.temperature, second.sampling.top_p, second.thinking) == (0.25, 0.5, False)


@pytest.mark.parametrize("stream", [False, True])
def test_omitted_thoughts_arrive_empty_and_signed(claude, service, stream):
    service.script = says("secret</think>42")
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}

    if stream:
        body = {"model": MODEL, "messages": HI, "max_tokens": 100, **fields}
        with claude.messages.stream(**body) as events:
            answer = events.get_final_message()
    else:
        answer = ask(claude, **fields)

    assert (answer.content[0].thinking, bool(answer.content[0].signature)) == ("", True)
    assert answer.content[1].text == "42"


@pytest.mark.parametrize("stop", ["END", "<｜User｜>"])
def test_a_stop_sequence_is_named_and_aborts_the_generation(claude, service, stop):
    service.script = lambda _: [*chunks_of(tokens_of(f"one two {stop} three"), finish=FinishReason.LENGTH)[:-1], HANG]

    answer = ask(claude, stop_sequences=[stop])

    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one two ", "stop_sequence", stop)
    service.wait_until_over()
    assert (service.num_aborted, service.num_ended) == (1, 0)


def test_generation_ends_where_the_tool_block_closes(claude, service):
    service.script = lambda _: [*chunks_of(tokens_of(CALL + "\n\nand more"), finish=FinishReason.LENGTH)[:-1], HANG]

    answer = ask(claude, tools=[WEATHER])

    assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", len(tokens_of(CALL)))
    service.wait_until_over()
    assert (service.num_aborted, service.num_ended) == (1, 0)


def test_the_length_limit_is_reported(claude, service):
    service.script = lambda _: chunks_of(tokens_of("one two"), finish=FinishReason.LENGTH)

    assert ask(claude, max_tokens=2).stop_reason == "max_tokens"


def test_a_schema_for_the_text_is_enforced_and_shown_to_the_model(claude, service):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    ask(claude, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})

    spec = service.requests[0].structured
    assert (spec.kind, json.loads(spec.schema)) == ("json_schema", {**schema, "additionalProperties": False})
    assert '"n"' in load_codec().text.decode(service.requests[0].prompt_token_ids)


@pytest.mark.parametrize("thinking", [OFF, {"type": "adaptive"}])
def test_an_assistant_message_at_the_end_is_continued(claude, service, thinking):
    service.script = says(" 42.")

    answer = ask(claude, messages=[*HI, {"role": "assistant", "content": "The answer is"}], thinking=thinking)

    prompt = load_codec().text.decode(service.requests[0].prompt_token_ids)
    assert prompt.endswith("</think>The answer is")
    assert not service.requests[0].thinking
    assert answer.content[-1].text == " 42."


def test_an_end_user_is_a_tenant_of_its_own(claude, service):
    ask(claude, metadata={"user_id": "u-1"})

    assert (service.requests[0].tenant, service.requests[0].cache_salt) == ("/u-1", "u-1")


def test_system_text_and_cache_marks_are_accepted(claude, service):
    mark = {"type": "ephemeral"}

    ask(
        claude,
        system=[{"type": "text", "text": "Be brief.", "cache_control": mark}],
        extra_body={"cache_control": mark},
    )
    ask(claude, system="Be brief.")

    assert service.requests[0].prompt_token_ids == service.requests[1].prompt_token_ids


@pytest.mark.parametrize("base", ["", "/anthropic"])
def test_counted_tokens_are_those_of_the_prompt(base_url, service, base):
    with anthropic.Anthropic(base_url=base_url + base, api_key="unused", max_retries=0, timeout=20) as client:
        fields = {"model": MODEL, "messages": HI, "system": "Be brief.", "tools": [WEATHER]}
        counted = client.messages.count_tokens(**fields)
        client.messages.create(max_tokens=9, **fields)

    assert counted.input_tokens == len(service.requests[0].prompt_token_ids)


def test_a_failure_in_the_middle_of_a_stream_is_an_error_event(claude, service):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], WorkerLostError("decode worker died")]

    with pytest.raises(anthropic.APIStatusError) as caught:
        list(ask(claude, stream=True))

    error = caught.value.body["error"]
    assert (error["type"], error["message"]) == ("overloaded_error", "decode worker died")


def test_the_requests_of_coding_agents_are_taken(http, service):
    mark = {"cache_control": {"type": "ephemeral"}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **WEATHER["input_schema"]}
    body = {
        "model": MODEL,
        "max_tokens": 2000,
        "stream": True,
        "system": [{"type": "text", "text": "You are an agent.", **mark}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **mark}]},
            {"role": "system", "content": "Be quick."},
        ],
        "tools": [{**WEATHER, "input_schema": schema, "eager_input_streaming": True, **mark}],
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }

    answer = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "a,b", "x-app": "cli"})

    assert answer.status_code == 200 and "message_stop" in answer.text
    assert "Be quick." in load_codec().text.decode(service.requests[0].prompt_token_ids)
