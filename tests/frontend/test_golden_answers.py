"""A sample of the golden completions over HTTP, streamed in arbitrary groups of tokens and whole."""

import json
import random

import pytest

from tests.kit.answers import answer_in, answer_of_events
from tests.kit.codec import NAMES, chunks_of, tokens_of
from tests.kit.golden_completions import golden_completions

SAMPLE = golden_completions()[::11]


@pytest.mark.parametrize("golden", SAMPLE, ids=lambda golden: golden.name)
def test_a_golden_is_the_same_message_streamed_and_whole(http, service, golden):
    rng = random.Random(golden.name)
    text = golden.output
    cut = rng.randrange(len(text))
    ids = [*tokens_of(text[:cut]), *tokens_of(text[cut:])]
    groups = rng.sample(range(len(ids)), rng.randrange(len(ids)))
    service.script = lambda _: chunks_of(ids, groups, finish=golden.ends_by)
    body = {"model": NAMES[0], "messages": [{"role": "user", "content": "hi"}], **golden.request_fields}

    whole = answer_in(http.post("/v1/chat/completions", json=body).json())
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    events = http.post("/v1/chat/completions", json=body | usage).text.split("\n\n")

    assert events[-2:] == ["data: [DONE]", ""]
    assert answer_of_events(json.loads(event.removeprefix("data: ")) for event in events[:-2]) == whole
    assert (whole["content"], whole["reasoning_content"]) == (golden.content, golden.reasoning)
    assert whole["finish_reason"] == golden.finish
