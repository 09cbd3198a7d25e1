"""A sample of the golden completions over HTTP on every endpoint, streamed in arbitrary groups of tokens and whole."""

import json
import random

import pytest

from tests.kit.answers import answer_in, answer_of_events
from tests.kit.codec import NAMES, chunks_of, tokens_of
from tests.kit.family_answers import (
    MESSAGES_ENDS,
    RESPONSES_ENDS,
    check_family,
    messages_body,
    messages_of_body,
    messages_of_events,
    responses_body,
    responses_of_body,
    responses_of_events,
)
from tests.kit.golden_completions import Golden, golden_completions

SAMPLE = golden_completions()[::11]
PLAIN = [golden for golden in SAMPLE if not golden.fields]


def named(golden: Golden) -> str:
    return golden.name


def play(service, golden: Golden) -> None:
    """The model emits the golden, cut once as text and anywhere between tokens."""
    rng = random.Random(golden.name)
    cut = rng.randrange(len(golden.output))
    ids = [*tokens_of(golden.output[:cut]), *tokens_of(golden.output[cut:])]
    groups = rng.sample(range(len(ids)), rng.randrange(len(ids)))
    service.script = lambda _: chunks_of(ids, groups, finish=golden.ends_by)


def both(http, path: str, body: dict, **when_streamed) -> tuple[dict, list[dict], str]:
    """(the whole body, the events of the stream but [DONE], the stream's text)."""
    body = {"model": NAMES[0], **body}
    whole = http.post(path, json=body)
    streamed = http.post(path, json={**body, "stream": True, **when_streamed})
    assert whole.status_code == streamed.status_code == 200, (whole.text, streamed.text)
    frames = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    return whole.json(), [json.loads(frame) for frame in frames if frame != "[DONE]"], streamed.text


@pytest.mark.parametrize("golden", SAMPLE, ids=named)
def test_a_golden_is_the_same_chat_message_streamed_and_whole(http, service, golden):
    play(service, golden)
    body = {"messages": [{"role": "user", "content": "hi"}], **golden.request_fields}

    whole, events, text = both(http, "/v1/chat/completions", body, stream_options={"include_usage": True})

    answer = answer_in(whole)
    assert text.endswith("data: [DONE]\n\n")
    assert answer_of_events(events) == answer
    assert (answer["content"], answer["reasoning_content"]) == (golden.content, golden.reasoning)
    assert answer["finish_reason"] == golden.finish


@pytest.mark.parametrize("golden", PLAIN, ids=named)
def test_a_golden_is_the_same_anthropic_message_streamed_and_whole(http, service, golden):
    play(service, golden)

    whole, events, _ = both(http, "/v1/messages", {**messages_body(golden), "max_tokens": 2000})

    check_family(golden, messages_of_events(events), messages_of_body(whole), MESSAGES_ENDS)
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize("golden", PLAIN, ids=named)
def test_a_golden_is_the_same_response_streamed_and_whole(http, service, golden):
    play(service, golden)

    whole, events, _ = both(http, "/v1/responses", responses_body(golden))

    check_family(golden, responses_of_events(events), responses_of_body(whole), RESPONSES_ENDS)
    last = events[-1]["response"]
    assert responses_of_body(last) == responses_of_body(whole)
    assert (last["status"], last["usage"]) == (whole["status"], whole["usage"])


@pytest.mark.parametrize("golden", SAMPLE, ids=named)
def test_a_golden_is_the_same_completion_streamed_and_whole(http, service, golden):
    play(service, golden)
    stop = golden.output[len(golden.output) // 2 :][:3]

    for fields, expected in (({}, golden.output), ({"stop": stop}, golden.output.partition(stop)[0])):
        whole, events, text = both(
            http, "/v1/completions", {"prompt": "hi", **fields}, stream_options={"include_usage": True}
        )
        choices = [choice for event in events for choice in event["choices"]]

        assert text.endswith("data: [DONE]\n\n")
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"] == expected
        assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert events[-1]["usage"] == whole["usage"]
