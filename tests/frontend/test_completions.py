"""`/v1/completions` through the public client and plain HTTP."""

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


def test_stream_framing(http, service):
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
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
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
