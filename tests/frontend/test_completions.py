"""`/v1/completions` through the public client and plain HTTP."""

import dataclasses
import json

import pytest

from dsv4_cluster.protocol.output import FinishReason
from tests.kit.codec import chunks_of, load_codec, tokens_of
from tests.kit.scripted_service import HANG, says

MODEL = "deepseek-v4-flash"


def ask(client, prompt="Once", **fields):
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def test_a_whole_answer_has_text_and_usage(client, service):
    service.script = says(" upon a time 🎉")

    answer = ask(client)

    assert answer.choices[0].text == " upon a time 🎉"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(service.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len(tokens_of(" upon a time 🎉"))
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_text_prompt_starts_with_bos_and_spelled_special_tokens_stay_text(client, service):
    ask(client, "<｜User｜>hi<think>")

    ids = service.requests[0].prompt_token_ids
    assert ids[0] == load_codec().text.bos_token_id
    assert not set(ids[1:]) & set(tokens_of("<｜User｜><think>"))
    assert load_codec().text.decode(ids[1:]) == "<｜User｜>hi<think>"


def test_token_ids_are_taken_as_they_stand(client, service):
    ask(client, [5, 6, 7])

    assert service.requests[0].prompt_token_ids == (5, 6, 7)


def test_defaults_and_values_reach_the_service(client, service):
    ask(client)
    ask(client, max_tokens=3, temperature=0, top_p=0.5, seed=11, stop=["a", "b"], logprobs=2)

    first, second = (request.sampling for request in service.requests)
    assert (first.max_tokens, first.temperature, first.top_p, first.logprobs) == (16, 1.0, 1.0, None)
    assert (second.max_tokens, second.temperature, second.top_p, second.seed) == (3, 0.0, 0.5, 11)
    assert second.logprobs == 2
    assert service.requests[1].stop.strings == ("a", "b")


def test_several_prompts_give_one_choice_each_in_order(client, service):
    words = {(5,): "five", (6, 6): "six", (7,): "seven"}
    service.script = lambda request: chunks_of(tokens_of(words[request.prompt_token_ids]))

    answer = ask(client, [[5], [6, 6], [7]])

    assert [choice.text for choice in answer.choices] == ["five", "six", "seven"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == sum(len(tokens_of(word)) for word in words.values())


def test_a_stream_of_several_prompts_keeps_them_apart(client, service):
    words = {5: "one two three", 6: "four five six"}
    service.script = lambda request: chunks_of(tokens_of(words[request.prompt_token_ids[0]]))

    texts, reasons = {0: "", 1: ""}, {}
    for chunk in ask(client, [[5], [6]], stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason

    assert list(texts.values()) == list(words.values())
    assert reasons == {0: "stop", 1: "stop"}


def test_one_failing_prompt_fails_the_request_and_aborts_the_others(http, service):
    service.script = lambda request: [RuntimeError("boom") if request.prompt_token_ids == (5,) else HANG]

    response = http.post("/v1/completions", json={"model": MODEL, "prompt": [[5], [6], [7]]})

    assert response.status_code == 500
    service.wait_until_over(3)
    assert (service.num_ended, service.num_aborted) == (1, 2)


def test_streamed_text_logprobs_and_usage_add_up_to_the_whole_answer(client, service):
    service.script = lambda _: chunks_of(tokens_of("a 🎉 b STO c STOP d"), with_logprobs=True)

    whole = ask(client, logprobs=1, stop="STOP")
    chunks = list(ask(client, logprobs=1, stop="STOP", stream=True, stream_options={"include_usage": True}))

    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text == "a 🎉 b STO c "
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [entry for choice in choices for entry in getattr(choice.logprobs, name)]
        assert parts == getattr(whole.choices[0].logprobs, name)
    assert chunks[-1].usage == whole.usage


def test_logprobs_spell_tokens_and_parts_of_characters(client, service):
    ids = tokens_of("a 🎉")
    service.script = lambda _: chunks_of(ids, with_logprobs=True)

    logprobs = ask(client, logprobs=1).choices[0].logprobs

    assert logprobs.tokens == ["a", "bytes:\\x20\\xf0\\x9f", "bytes:\\x8e", "bytes:\\x89"]
    assert logprobs.token_logprobs == [-1.0] * 4
    assert logprobs.text_offset == [0, 1, 2, 2]
    assert logprobs.top_logprobs[0] == {"!": -0.5}


def test_an_answer_cut_inside_a_character_ends_with_a_replacement_mark(client, service):
    ids = tokens_of("a 🎉")[:-1]
    service.script = lambda _: chunks_of(ids, finish=FinishReason.LENGTH)

    answer = ask(client)

    assert answer.choices[0].text == "a �"
    assert answer.usage.completion_tokens == len(ids)


def test_a_stream_is_unbuffered_events_and_ends_with_done(http, service):
    service.script = says("one two")

    response = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True})

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], 5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [129280]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 10**300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "suffix": "end"}, "echo"),
        ({"echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": "end", "prompt": [5, 6]}, "prompt"),
        ({"suffix": "end", "prompt": []}, "prompt"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "(a"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"priority": -1}, "priority"),
        ({"user_id": 5}, "user_id"),
        ({"best_of": 2}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_or_refused_field_is_400_by_name(http, service, fields, param):
    response = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", **fields})

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert service.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_echo_shows_the_prompt_in_front_of_the_answer(client, service, stream):
    service.script = says(" upon a time")

    answer = ask(client, "Once <｜User｜> 🎉", echo=True, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text

    assert text == "Once <｜User｜> 🎉 upon a time"
    assert service.requests[0].sampling.prompt_logprobs is None


def with_prompt_logprobs(text: str):
    """Chunks for a prompt whose every token has the log-probability of its position."""

    def script(request):
        ids = request.prompt_token_ids
        known = [None, *({ids[i]: -float(i), 3: -0.25} for i in range(1, len(ids)))]
        first, *rest = chunks_of(tokens_of(text), with_logprobs=True)
        return [dataclasses.replace(first, prompt_logprobs=known), *rest]

    return script


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(client, service, stream):
    service.script = with_prompt_logprobs(" two")
    prompt = "one 🎉"
    ids = tokens_of(prompt)

    answer = ask(client, prompt, echo=True, logprobs=1, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    values = {name: [x for part in parts for x in getattr(part, name)] for name in ("token_logprobs", "text_offset")}
    tokens = [x for part in parts for x in part.tokens]
    top = [x for part in parts for x in part.top_logprobs]

    assert tokens[0] == "one" and tokens[-1] == " two" and len(tokens) == len(ids) + 1
    assert values["token_logprobs"] == [*(-float(i) for i in range(1, len(ids) + 1)), -1.0]
    assert values["text_offset"] == [0, 3, *[4] * (len(ids) - 2), len(prompt)]
    assert top[0] == {load_codec().text.decode([3]): -0.25}
    assert service.requests[0].sampling.prompt_logprobs == 1


def test_the_first_of_echoed_ids_has_no_logprob(client, service):
    service.script = with_prompt_logprobs(" two")

    logprobs = ask(client, [5, 6], echo=True, logprobs=0).choices[0].logprobs

    assert logprobs.token_logprobs == [None, -1.0, -1.0]
    assert logprobs.top_logprobs[0] is None


def test_no_tokens_but_the_echo(client, service):
    service.script = with_prompt_logprobs(" never shown")

    answer = ask(client, "one two", echo=True, logprobs=0, max_tokens=0)

    assert answer.choices[0].text == "one two"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == len(tokens_of("one two"))
    assert service.requests[0].sampling.max_tokens == 1


def test_a_suffix_asks_for_the_middle(client, service):
    service.script = says("return a + b")

    answer = ask(client, "def add(a, b):\n    ", suffix="\n\nprint(<｜fim▁end｜>)")

    assert answer.choices[0].text == "return a + b"
    ids = service.requests[0].prompt_token_ids
    assert ids[:2] == (0, 128801) and ids[-1] == 128802 and ids.count(128800) == 1 and ids.count(128802) == 1
    hole = ids.index(128800)
    assert load_codec().text.decode(ids[2:hole]) == "def add(a, b):\n    "
    assert load_codec().text.decode(ids[hole + 1 : -1]) == "\n\nprint(<｜fim▁end｜>)"


def test_a_response_format_reaches_the_service(client, service):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for response_format in (
        {"type": "json_object"},
        {"type": "regex", "regex": "[a-z]+"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        {"type": "text"},
    ):
        ask(client, extra_body={"response_format": response_format})

    sent = [request.structured for request in service.requests]
    assert [spec and spec.kind for spec in sent] == ["json_object", "regex", "json_schema", None]
    assert json.loads(sent[2].schema) == {**schema, "required": ["n"], "additionalProperties": False}


def test_user_id_and_priority_reach_the_service(client, service):
    ask(client, extra_body={"user_id": "ann", "priority": 3})

    request = service.requests[0]
    assert (request.tenant, request.cache_salt, request.priority) == ("/ann", "ann", 3)
