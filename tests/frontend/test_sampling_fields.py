"""Sampling extensions and several answers per request, on both endpoints, through the public client."""

import itertools
import json

import pytest

from dsv4_cluster.protocol.copies import copy_seed
from dsv4_cluster.protocol.output import TokenChunk
from tests.kit.codec import chunks_of, tokens_of
from tests.kit.scripted_service import HANG, says

MODEL = "deepseek-v4-flash"
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "word " * 200  # a prompt whose pages can be shared


def ask_chat(client, *, content="hi", extra_body=None, **fields):
    extra = {"thinking": {"type": "disabled"}} | (extra_body or {})
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **fields)


def ask_text(client, *, content="hi", **fields):
    return client.completions.create(model=MODEL, prompt=content, **fields)


def post(http, path, **fields):
    prompt = {"messages": HI, "thinking": {"type": "disabled"}} if path == CHAT else {"prompt": "hi"}
    return http.post(path, content=json.dumps({"model": MODEL, **prompt, **fields}).encode())


@pytest.mark.parametrize("ask", [ask_chat, ask_text])
def test_every_sampling_field_reaches_the_service(client, service, ask):
    ask(
        client,
        max_tokens=30,
        presence_penalty=0.5,
        frequency_penalty=-1.5,
        logit_bias={"5": 10, "6": -100},
        extra_body={
            "top_k": 20,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 3,
            "stop_token_ids": [7, 9, 7],
        },
    )

    request = service.requests[0]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (20, 0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.5)
    assert sampling.logit_bias == ((5, 10.0), (6, -100.0))
    assert (request.stop.min_tokens, request.stop.token_ids, request.stop.ignore_eos) == (3, (7, 9, 1), False)


@pytest.mark.parametrize("ask", [ask_chat, ask_text])
def test_without_them_nothing_is_asked_for(client, service, ask):
    ask(client, extra_body={"top_k": -1})

    sampling, stop = service.requests[0].sampling, service.requests[0].stop
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.logit_bias) == (0, 0.0, 1.0, ())
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.0, 0.0)
    assert (stop.token_ids, stop.ignore_eos, stop.min_tokens) == ((1,), False, 0)


@pytest.mark.parametrize("ask", [ask_chat, ask_text])
def test_an_ignored_eos_is_counted_and_not_shown(client, service, ask):
    ids = [*tokens_of("one"), 1, *tokens_of(" two")]
    service.script = lambda _: chunks_of(ids, finish="length", stop_token_id=None)

    answer = ask(client, extra_body={"ignore_eos": True})

    choice = answer.choices[0]
    assert (choice.message.content if ask is ask_chat else choice.text) == "one two"
    assert answer.usage.completion_tokens == len(ids)
    assert service.requests[0].stop.ignore_eos
    assert service.requests[0].stop.token_ids == ()


@pytest.mark.parametrize("ask", [ask_chat, ask_text])
def test_a_stop_token_of_the_caller_is_not_in_the_text(client, service, ask):
    service.script = lambda _: chunks_of(tokens_of("one two"), stop_token_id=90)

    choice = ask(client, extra_body={"stop_token_ids": [90]}).choices[0]

    assert (choice.message.content if ask is ask_chat else choice.text) == "one two"
    assert choice.finish_reason == "stop"


def numbered(service) -> None:
    """Every stream says another word."""
    words = itertools.count(1)
    service.script = lambda _: chunks_of(tokens_of(f"answer {next(words)}"))


@pytest.mark.parametrize("ask", [ask_chat, ask_text])
@pytest.mark.parametrize("content", ["hi", LONG])
def test_n_answers_are_n_choices_from_n_seeds(client, service, ask, content):
    numbered(service)

    answer = ask(client, content=content, n=3, seed=11)

    texts = [choice.message.content if ask is ask_chat else choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert sorted(texts) == ["answer 1", "answer 2", "answer 3"]
    assert sorted(r.sampling.seed for r in service.requests) == sorted(copy_seed(11, i) for i in range(3))
    assert len({request.request_id for request in service.requests}) == 3
    assert answer.usage.prompt_tokens == len(service.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(tokens_of(text)) for text in texts)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("ask", [ask_chat, ask_text])
def test_n_streamed_answers_are_told_apart_and_share_one_usage(client, service, ask):
    numbered(service)

    chunks = list(ask(client, n=3, stream=True, stream_options={"include_usage": True}))

    texts, reasons = {0: "", 1: "", 2: ""}, {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content if ask is ask_chat else choice.text) or ""
            reasons[choice.index] = choice.finish_reason
    assert sorted(texts.values()) == ["answer 1", "answer 2", "answer 3"]
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == sum(len(tokens_of(text)) for text in texts.values())
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("ask", [ask_chat, ask_text])
def test_copies_of_a_long_prompt_start_after_its_first_token(client, service, ask):
    seen: list[int] = []

    def script(request):
        seen.append(len(service.requests))
        return chunks_of(tokens_of("one two three"), num_cached_tokens=0 if len(seen) == 1 else 128)

    service.script = script

    answer = ask(client, content=LONG, n=2, seed=4)

    assert [request.sampling.seed for request in service.requests] == [4, copy_seed(4, 1)]
    assert answer.usage.prompt_tokens_details.cached_tokens == 0  # computed once, so not all of it was cached


def test_completions_number_choices_by_prompt_then_copy(client, service):
    service.script = lambda request: chunks_of(tokens_of("five" if request.prompt_token_ids == (5,) else "six"))

    answer = ask_text(client, content=[[5], [6]], n=2)

    assert [choice.text for choice in answer.choices] == ["five", "five", "six", "six"]
    assert answer.usage.prompt_tokens == 2


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_failing_first_answer_fails_the_request_and_starts_no_copies(http, service, path):
    service.script = lambda _: [RuntimeError("boom")]
    prompt = {"messages": [{"role": "user", "content": LONG}]} if path == CHAT else {"prompt": LONG}

    response = post(http, path, n=3, **prompt)

    assert response.status_code == 500
    assert len(service.requests) == 1


def test_a_stop_string_ends_one_choice_and_not_the_others(client, service):
    texts = iter(["one END two", "three four"])

    def script(_):
        text = next(texts)
        return [*chunks_of(tokens_of(text))[:-1], HANG] if "END" in text else chunks_of(tokens_of(text))

    service.script = script

    answer = ask_chat(client, n=2, stop="END")

    assert sorted(choice.message.content for choice in answer.choices) == ["one ", "three four"]
    service.wait_until_over(2)
    assert (service.num_aborted, service.num_ended) == (1, 1)


def test_reasoning_tokens_of_all_answers_are_summed(client, service):
    service.script = says("Let me see.</think>42")

    one = ask_chat(client, extra_body={"thinking": {"type": "enabled"}})
    two = ask_chat(client, extra_body={"thinking": {"type": "enabled"}}, n=2)

    thoughts = one.usage.completion_tokens_details.reasoning_tokens
    assert two.usage.completion_tokens_details.reasoning_tokens == 2 * thoughts > 0


def test_a_thinking_budget_reaches_the_service(client, service):
    service.script = says("Hm.</think>42")

    ask_chat(client, extra_body={"thinking": {"type": "enabled"}, "thinking_token_budget": 50})

    assert service.requests[0].thinking
    assert service.requests[0].thinking_budget == 50


WRONG = [
    ({"n": 0}, "n", "n is 0"),
    ({"n": 129}, "n", "128"),
    ({"n": True}, "n", "True"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": 1.5}, "top_k", "1.5"),
    ({"min_p": 1.1}, "min_p", "1.1"),
    ({"presence_penalty": 2.1}, "presence_penalty", "2.1"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
    ({"repetition_penalty": 10**300}, "repetition_penalty", "100"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias['5'] is 101"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "'five'"),
    ({"logit_bias": {"05": 1}}, "logit_bias", "'05'"),
    ({"logit_bias": {"129280": 1}}, "logit_bias", "129280"),
    ({"logit_bias": [5]}, "logit_bias", "dictionary"),
    ({"stop_token_ids": [129280]}, "stop_token_ids", "129280"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "'a'"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens = 8"),
    ({"ignore_eos": 1}, "ignore_eos", "boolean"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "param", "said"), WRONG, ids=[str(fields)[:40] for fields, _, _ in WRONG])
def test_a_value_out_of_range_is_400_with_field_value_and_limit(http, service, path, fields, param, said):
    response = post(http, path, **fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert said in error["message"] and param in error["message"]
    assert service.requests == []


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_a_wrong_thinking_budget_is_400(http, service, value):
    response = post(http, CHAT, thinking_token_budget=value, thinking={"type": "enabled"})

    assert response.json()["error"]["param"] == "thinking_token_budget"
    assert service.requests == []


def test_a_thinking_budget_without_thinking_or_on_completions_is_400(http):
    for path in (CHAT, TEXT):
        response = post(http, path, thinking_token_budget=5)

        assert response.status_code == 400
        assert response.json()["error"]["param"] == "thinking_token_budget"


def test_chunks_of_several_tokens_keep_the_choices_apart(client, service):
    both = chunks_of(tokens_of("a b c d"), cuts=[2])
    service.script = lambda _: [TokenChunk(request_id="x", token_ids=()), *both]

    answer = ask_chat(client, n=2)

    assert [choice.message.content for choice in answer.choices] == ["a b c d"] * 2
