"""The public `openai` client's own helpers: parsing into classes, stream accumulation, tools, async cancellation."""

import asyncio
import json

import openai
import pydantic
import pytest

from tests.kit.codec import NAMES, chunks_of, tokens_of
from tests.kit.scripted_service import HANG, says

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["cmd", "n"],
            "additionalProperties": False,
        },
    },
}
CALL = (
    'I run it.</think>Wait.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n'
    '<｜DSML｜parameter name="cmd" string="true">ls "a" 2>&1 | wc 🎉</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
ARGUMENTS = {"cmd": 'ls "a" 2>&1 | wc 🎉', "n": 3}


class Point(pydantic.BaseModel):
    """A point."""

    x: int
    y: int


def test_an_answer_is_parsed_into_a_class(client, service):
    service.script = says('It is simple.</think>{"x": 1, "y": -2}')

    answer = client.chat.completions.parse(model=NAMES[0], messages=HI, response_format=Point)

    assert answer.choices[0].message.parsed == Point(x=1, y=-2)
    request = service.requests[0]
    assert request.thinking and request.structured.kind == "json_schema"
    assert json.loads(request.structured.schema)["required"] == ["x", "y"]


def test_a_strict_call_is_parsed(client, service):
    service.script = says(CALL)

    message = client.chat.completions.parse(model=NAMES[0], messages=HI, tools=[TOOL]).choices[0].message

    assert message.tool_calls[0].function.parsed_arguments == ARGUMENTS
    assert message.content == "Wait."


def test_the_stream_helper_puts_the_same_message_together(client, service):
    service.script = says(CALL)
    ask = {"model": NAMES[0], "messages": HI, "tools": [TOOL]}

    with client.chat.completions.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    whole = client.chat.completions.create(**ask).choices[0]

    assert kinds.count("tool_calls.function.arguments.delta") > 5
    assert kinds.count("tool_calls.function.arguments.done") == kinds.count("content.done") == 1
    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Wait."
        assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS
    assert streamed.message.tool_calls[0].function.arguments == whole.message.tool_calls[0].function.arguments


def test_several_calls_stream_with_their_own_indices_and_ids(client, service):
    block = CALL.replace("</｜DSML｜invoke>", '</｜DSML｜invoke>\n<｜DSML｜invoke name="run">\n</｜DSML｜invoke>')
    service.script = says(block)

    calls: dict[int, list] = {}
    for chunk in client.chat.completions.create(model=NAMES[0], messages=HI, tools=[TOOL], stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            calls.setdefault(part.index, []).append(part)

    assert sorted(calls) == [0, 1]
    assert all([bool(part.id) for part in parts] == [True] + [False] * (len(parts) - 1) for parts in calls.values())
    assert len({parts[0].id for parts in calls.values()}) == 2
    assert "".join(part.function.arguments for part in calls[1]) == "{}"


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_an_async_call_aborts_its_generation_and_no_other(base_url, service, stream):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], HANG]

    async def cancel_one() -> None:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
            task = asyncio.create_task(_consume(client, stream=stream))
            other = asyncio.create_task(_consume(client, stream=stream))
            await asyncio.to_thread(service.wait_until_started, 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(service.wait_until_over, 1)
            assert (service.num_aborted, service.num_ended) == (1, 0)
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            await asyncio.to_thread(service.wait_until_over, 2)

    asyncio.run(cancel_one())

    assert (service.num_aborted, service.num_ended) == (2, 0)


def test_breaking_out_of_an_async_stream_aborts_the_generation(base_url, service):
    service.script = lambda _: [*chunks_of(tokens_of("one two three"))[:2], HANG]

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
            ask = {"model": NAMES[0], "messages": HI, "stream": True, "reasoning_effort": "none"}
            async with await client.chat.completions.create(**ask) as stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break

    asyncio.run(leave())
    service.wait_until_over()

    assert service.num_aborted == 1


def test_many_async_requests_at_once_are_answered_each_with_its_own(base_url, service):
    service.script = lambda request: chunks_of(tokens_of(f"seed {request.sampling.seed}"))

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
            ask = {"model": NAMES[0], "messages": HI, "reasoning_effort": "none"}
            answers = await asyncio.gather(*(client.chat.completions.create(seed=seed, **ask) for seed in range(16)))
            return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask_all()) == [f"seed {seed}" for seed in range(16)]


async def _consume(client: openai.AsyncOpenAI, *, stream: bool) -> None:
    answer = await client.chat.completions.create(model=NAMES[0], messages=HI, reasoning_effort="none", stream=stream)
    if stream:
        async for _ in answer:
            pass
