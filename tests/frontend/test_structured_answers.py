"""Every API over a real engine with random weights: what comes back has the form that was asked for."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence

import anthropic
import httpx
import openai
import pytest

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.tokenizer.encoding import ModelCodec
from dsv4_cluster.tokenizer.models import ServedModels
from tests.kit.http_server import serving

MODEL = "toy"
OFF = {"thinking": {"type": "disabled"}}
CALLED = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["n", "unit"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "enum": [1, 22, 333]}}, "required": ["n"]}


class EngineService:
    """One engine stepped by whichever request waits; enough for one client."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        self.core.add(request)
        try:
            while self.core.has_work():
                for chunk in (await asyncio.to_thread(self.core.step)).chunks:
                    yield chunk
        finally:
            self.core.abort(request.request_id)

    def model_names(self) -> Sequence[str]:
        return (MODEL,)

    async def unready_reasons(self) -> Sequence[str]:
        return ()


@pytest.fixture(scope="module")
def toy(toy_dir) -> Iterator[httpx.Client]:
    """A client of a server over the toy model; at most 24 thought tokens, a fixed seed."""
    core = EngineCore.from_checkpoint(
        toy_dir, EngineConfig(dtype="float32", max_num_seqs=2), KVConfig(num_pages=32), SpeculationConfig()
    )
    codec = ModelCodec.from_checkpoint(toy_dir, ServedModels.of((MODEL,)))
    app = create_app(EngineService(core), codec, RouterConfig(), max_model_len=core.max_model_len)
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client
    core.check()
    assert not core.has_work()


def _choice(toy, **fields) -> dict:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "json"}], "max_tokens": 400, "seed": 3}
    if "thinking" not in fields:
        fields["thinking_token_budget"] = 24
    response = toy.post("/v1/chat/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("thinking", [{}, OFF], ids=["thinking", "chat"])
def test_the_content_follows_the_schema(toy, thinking):
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}

    choice = _choice(toy, response_format=response_format, **thinking)

    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["n"] in (1, 22, 333)
    assert bool(choice["message"].get("reasoning_content")) is (not thinking)


@pytest.mark.parametrize("thinking", [{}, OFF], ids=["thinking", "chat"])
def test_the_content_matches_the_pattern(toy, thinking):
    choice = _choice(toy, response_format={"type": "regex", "regex": "[a-c]{3,5}!"}, **thinking)

    assert choice["finish_reason"] == "stop"
    assert re.fullmatch("[a-c]{3,5}!", choice["message"]["content"])


@pytest.mark.parametrize("thinking", [{}, OFF], ids=["thinking", "chat"])
@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_a_forced_call_is_a_call_with_arguments_of_the_schema(toy, thinking, tool_choice):
    choice = _choice(toy, tools=[CALLED], tool_choice=tool_choice, max_tokens=180, **thinking)

    call, *_ = choice["message"]["tool_calls"]  # random weights call again and again; the limit may cut the last call
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "add"
    assert 0 <= arguments["n"] <= 99 and arguments["unit"] in ("C", "F")


def test_an_answer_cut_short_is_reported_as_length(toy):
    choice = _choice(toy, response_format={"type": "regex", "regex": "[ab]{200}"}, max_tokens=4, **OFF)

    assert choice["finish_reason"] == "length"


def test_a_completion_has_the_form_that_is_asked_for(toy):
    body = {"model": MODEL, "prompt": "The answer is ", "max_tokens": 400, "seed": 3}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}

    as_json = toy.post("/v1/completions", json={**body, "response_format": schema}).json()["choices"][0]["text"]
    pattern = {"type": "regex", "regex": "[ab]{3}-[0-9]{2}"}
    as_regex = toy.post("/v1/completions", json={**body, "response_format": pattern}).json()["choices"][0]["text"]

    assert json.loads(as_json)["n"] in SCHEMA["properties"]["n"]["enum"]
    assert re.fullmatch("[ab]{3}-[0-9]{2}", as_regex)


def test_echoed_logprobs_do_not_depend_on_what_follows(toy):
    body = {"model": MODEL, "logprobs": 2, "echo": True, "max_tokens": 0}
    ids = [5, 6, 7, 8, 9, 10, 11]

    short, whole = (
        toy.post("/v1/completions", json={**body, "prompt": prompt}).json()["choices"][0]["logprobs"]
        for prompt in (ids[:4], ids)
    )

    assert [len(part["token_logprobs"]) for part in (short, whole)] == [4, 7]
    assert short["token_logprobs"][0] is whole["token_logprobs"][0] is None
    assert whole["token_logprobs"][1:4] == pytest.approx(short["token_logprobs"][1:], abs=1e-4)
    assert all(value < 0 for value in whole["token_logprobs"][1:])
    assert all(len(top) in (2, 3) for top in whole["top_logprobs"][1:])


def test_messages_have_the_form_that_is_asked_for(toy):
    function, thinking = CALLED["function"], {"type": "enabled", "budget_tokens": 24}
    tool = {"name": function["name"], "input_schema": function["parameters"], "strict": True}
    fields = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}], "thinking": thinking}
    form = {"type": "json_schema", "schema": SCHEMA}

    with anthropic.Anthropic(base_url=str(toy.base_url), api_key="unused", max_retries=0) as client:
        called = client.messages.create(
            **fields,
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            extra_body={"seed": 3},
        )
        with client.messages.stream(**fields, extra_body={"seed": 3, "output_config": {"format": form}}) as stream:
            written = stream.get_final_message()

    assert [block.type for block in called.content] == ["thinking", "tool_use"]
    assert 0 <= called.content[-1].input["n"] <= 99 and called.content[-1].input["unit"] in ("C", "F")
    assert called.stop_reason == "tool_use"
    assert [block.type for block in written.content] == ["thinking", "text"]
    assert json.loads(written.content[-1].text)["n"] in SCHEMA["properties"]["n"]["enum"]


def test_responses_have_the_form_that_is_asked_for(toy):
    fields = {"model": MODEL, "max_output_tokens": 400, "reasoning": {"effort": "low"}}
    extra = {"seed": 3, "thinking_token_budget": 24}
    tool = {"type": "function", **CALLED["function"]}
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}

    with openai.OpenAI(base_url=f"{toy.base_url}/v1", api_key="unused", max_retries=0) as client:
        called = client.responses.create(
            **fields, input="hi", tools=[tool], tool_choice="required", parallel_tool_calls=False, extra_body=extra
        )
        result = {"type": "function_call_output", "call_id": called.output[-1].call_id, "output": "7"}
        written = client.responses.create(
            **fields, input=[result], previous_response_id=called.id, text={"format": form}, extra_body=extra
        )

    assert [item.type for item in called.output] == ["reasoning", "function_call"]
    arguments = json.loads(called.output[-1].arguments)
    assert 0 <= arguments["n"] <= 99 and arguments["unit"] in ("C", "F")
    assert json.loads(written.output_text)["n"] in SCHEMA["properties"]["n"]["enum"]
