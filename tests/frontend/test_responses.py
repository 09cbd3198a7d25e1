"""`/v1/responses` through the public client."""

import json

import openai
import pytest
from pydantic import BaseModel

from dsv4_cluster.errors import WorkerLostError
from dsv4_cluster.protocol.output import FinishReason
from tests.kit.codec import chunks_of, load_codec, tokens_of
from tests.kit.scripted_service import HANG, says

MODEL = "deepseek-v4-flash"
OFF = {"effort": "none"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def ask(client, **fields):
    return client.responses.create(**{"model": MODEL, "input": "hi", "reasoning": OFF, **fields})


def prompt_of(request) -> str:
    return load_codec().text.decode(request.prompt_token_ids)


def test_a_whole_response_has_text_status_and_usage(client, service):
    service.script = lambda _: chunks_of(tokens_of("Good morning"), num_cached_tokens=2)

    answer = ask(client, instructions="Be brief.", metadata={"team": "a"}, max_output_tokens=50)

    assert (answer.output_text, answer.status, answer.model) == ("Good morning", "completed", MODEL)
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"team": "a"}, 50)
    assert answer.usage.input_tokens == len(service.requests[0].prompt_token_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.output_tokens == len(tokens_of("Good morning"))
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.id == service.requests[0].request_id
    assert service.requests[0].sampling.max_tokens == 50


def test_stream_events_come_in_the_documented_order_with_sequence_numbers(client, service):
    service.script = says("hm</think>Sure." + CALL)

    events = list(ask(client, stream=True, tools=[WEATHER], reasoning={"effort": "high"}))

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event.type for event in events)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 1


def test_a_streamed_response_equals_the_whole_one(client, service):
    service.script = says("Let me see.</think>One 🎉 drei 四" + CALL)
    fields = {"model": MODEL, "input": "hi", "tools": [WEATHER]}

    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        streamed = stream.get_final_response()

    def facts(response):
        own = {"id", "call_id", "encrypted_content", "parsed", "parsed_arguments"}
        items = [item.model_dump(exclude=own) for item in response.output]
        for item in items:
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return items, response.status, response.usage.model_dump()

    assert facts(streamed) == facts(whole)
    assert json.loads(whole.output[2].arguments) == {"city": "Paris"}


def test_events_have_names_and_no_done_mark(http, service):
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "hi", "reasoning": OFF, "stream": True})

    lines = answer.text.splitlines()
    names = [line[7:] for line in lines if line.startswith("event: ")]
    types = [json.loads(line[6:])["type"] for line in lines if line.startswith("data: ")]
    assert names == types
    assert (names[0], names[-1]) == ("response.created", "response.completed")


def test_a_tools_loop_runs_over_the_previous_response(client, service):
    service.script = says("hm</think>" + CALL)
    first = client.responses.create(model=MODEL, input="weather?", tools=[WEATHER])
    call = first.output[-1]
    service.script = says("ok</think>It is sunny.")

    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        tools=[WEATHER],
    )

    prompt = prompt_of(service.requests[1])
    assert second.output_text == "It is sunny."
    assert second.previous_response_id == first.id
    for text in ("weather?", "<think>hm</think>", ">Paris<", "<tool_result>sunny</tool_result>"):
        assert text in prompt


def test_a_previous_response_gives_the_prompt_of_the_whole_history(client, service):
    service.script = says("Hello.")
    first = ask(client, input="hi", instructions="Only for the first turn.")
    second = ask(client, input="and?", previous_response_id=first.id)
    ask(
        client,
        input=[
            {"role": "user", "content": "hi"},
            *[item.model_dump() for item in first.output],
            {"role": "user", "content": "and?"},
        ],
    )

    assert service.requests[1].prompt_token_ids == service.requests[2].prompt_token_ids
    assert second.id != first.id


@pytest.mark.parametrize("reasoning", [OFF, {"effort": "high"}])
@pytest.mark.parametrize(
    ("choice", "kind", "num_tools"),
    [
        ("auto", "tool_call", 2),
        ("required", "tool_call_required", 2),
        ({"type": "function", "name": "b"}, "tool_call_required", 1),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]},
            "tool_call_required",
            1,
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}, "tool_call", 1),
    ],
)
def test_a_tool_choice_constrains_the_answer_also_while_thinking(client, service, reasoning, choice, kind, num_tools):
    tools = [WEATHER, {"type": "function", "name": "b", "parameters": {"type": "object"}}]

    answer = ask(client, tools=tools, tool_choice=choice, reasoning=reasoning)

    spec = service.requests[0].structured
    assert (spec.kind, len(json.loads(spec.schema))) == (kind, num_tools)
    assert service.requests[0].thinking == (reasoning is not OFF)
    assert answer.model_dump(exclude_unset=True)["tool_choice"] == choice
    assert [tool.name for tool in answer.tools] == ["get_weather", "b"]


def test_parallel_tool_calls_can_be_switched_off(client, service):
    answer = ask(client, tools=[WEATHER], parallel_tool_calls=False)

    assert service.requests[0].structured.is_single_call
    assert answer.parallel_tool_calls is False


def test_namespaces_of_tools_are_split_again(client, service):
    service.script = says(CALL.replace("get_weather", "geo__get_weather"))
    namespace = {"type": "namespace", "name": "geo", "description": "d", "tools": [WEATHER]}

    answer = ask(client, tools=[namespace])

    call = answer.output[-1]
    assert (call.name, call.model_dump()["namespace"]) == ("get_weather", "geo")


class Point(BaseModel):
    x: int


def test_a_json_schema_is_enforced_and_parsed(client, service):
    service.script = says('{"x": 3}')

    answer = client.responses.parse(model=MODEL, input="a point", reasoning=OFF, text_format=Point)

    spec = service.requests[0].structured
    assert answer.output_parsed == Point(x=3)
    assert spec.kind == "json_schema" and json.loads(spec.schema)["additionalProperties"] is False


def test_json_mode_is_enforced(client, service):
    ask(client, input="json please", text={"format": {"type": "json_object"}})

    assert service.requests[0].structured.kind == "json_object"


def test_logprobs_come_with_the_text(client, service):
    service.script = lambda _: chunks_of(tokens_of("one two"), with_logprobs=True)

    answer = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)

    entries = answer.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob) for entry in entries] == [("one", -1.0), (" two", -1.0)]
    assert service.requests[0].sampling.logprobs == 2


def test_sampling_values_and_the_end_user_reach_the_service(client, service):
    ask(
        client,
        temperature=0.25,
        top_p=0.5,
        safety_identifier="u-1",
        extra_body={"seed": 7, "top_k": 4, "presence_penalty": 0.5},
    )
    ask(client, reasoning={"effort": "low"}, extra_body={"thinking_token_budget": 9})

    request = service.requests[0]
    assert service.requests[1].thinking_budget == 9
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.25, 0.5, 7)
    assert (request.sampling.top_k, request.sampling.presence_penalty) == (4, 0.5)
    assert (request.tenant, request.cache_salt) == ("/u-1", "u-1")


def test_generation_ends_where_the_tool_block_closes(client, service):
    service.script = lambda _: [*chunks_of(tokens_of(CALL + "\n\nand more"), finish=FinishReason.LENGTH)[:-1], HANG]

    answer = ask(client, tools=[WEATHER])

    assert (answer.status, answer.usage.output_tokens) == ("completed", len(tokens_of(CALL)))
    service.wait_until_over()
    assert (service.num_aborted, service.num_ended) == (1, 0)


def test_the_length_limit_makes_a_response_incomplete(client, service):
    service.script = lambda _: chunks_of(tokens_of("one two"), finish=FinishReason.LENGTH)

    answer = ask(client, max_output_tokens=2)

    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert client.responses.retrieve(answer.id).status == "incomplete"


def test_a_failure_in_the_middle_of_a_stream_is_a_failed_response(client, service):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], WorkerLostError("decode worker died")]

    events = list(ask(client, stream=True))

    assert events[-1].type == "response.failed"
    assert events[-1].sequence_number == len(events) - 1
    assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "decode worker died")


def test_a_failure_before_the_first_event_is_an_http_error(client, service):
    service.script = lambda _: [WorkerLostError("decode worker died")]

    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, stream=True)

    assert caught.value.status_code == 503


def test_input_tokens_are_those_of_the_prompt(client, service):
    counted = client.responses.input_tokens.count(model=MODEL, input="hi", tools=[WEATHER], reasoning=OFF)
    ask(client, tools=[WEATHER])

    assert counted.input_tokens == len(service.requests[0].prompt_token_ids)


def test_leaving_the_stream_aborts_and_keeps_nothing(client, service):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], HANG]

    with ask(client, stream=True) as stream:
        response_id = next(iter(stream)).response.id
    service.wait_until_over()

    assert (service.num_aborted, service.num_ended) == (1, 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


def test_the_requests_of_coding_agents_are_taken(http, service):
    patch = "*** Begin Patch\n+a\n*** End Patch"
    call = CALL.replace("get_weather", "apply_patch").replace("city", "input").replace("Paris", patch)
    service.script = says("hm</think>" + call)
    body = {
        "model": MODEL,
        "instructions": "You are an agent.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "patch it"}]}],
        "tools": [
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": ""},
            },
            {**WEATHER, "strict": False},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
    }

    output = http.post("/v1/responses", json=body).json()["output"]
    result = {"type": "custom_tool_call_output", "call_id": output[-1]["call_id"], "output": "Success."}
    again = http.post("/v1/responses", json={**body, "input": [*body["input"], *output, result], "stream": True})

    assert (output[-1]["type"], output[-1]["input"]) == ("custom_tool_call", patch)
    assert again.status_code == 200
    assert f">{patch}<" in prompt_of(service.requests[1]) and "Success." in prompt_of(service.requests[1])


def test_instructions_alone_are_a_prompt_whose_length_can_be_counted(http, service):
    body = {"model": "deepseek-v4-flash", "instructions": "Say hi."}

    counted = http.post("/v1/responses/input_tokens", json=body)
    answered = http.post("/v1/responses", json=body)

    assert (counted.status_code, answered.status_code) == (200, 200), counted.text
    assert counted.json()["input_tokens"] == len(service.requests[0].prompt_token_ids)
