"""Messages and Responses read an answer as chat does: every golden completion, however it is cut, streamed or whole."""

import json
import random
from typing import Any

import deepseek_recipe as recipe
import pytest

from dsv4_cluster.tokenizer.chat_output import ChatParser
from dsv4_cluster.tokenizer.family import ApiFamily
from dsv4_cluster.tokenizer.messages_family import MESSAGES
from dsv4_cluster.tokenizer.responses_family import RESPONSES
from tests.kit.codec import CONTEXT_LIMIT, NAMES, chunks_of, load_codec, tokens_of
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

GOLDENS = [golden for golden in golden_completions() if not golden.fields]
NUM_PARTS = 8


def events_of(family: ApiFamily, body: dict[str, Any], golden: Golden, cuts: list[int]) -> list[Any]:
    prompt = load_codec().chat.encode({"model": NAMES[0], **body}, family=family, context_limit=CONTEXT_LIMIT)
    parser = ChatParser(load_codec().chat, prompt, response_id="id", eos_token_id=load_codec().text.eos_token_id)
    chunks = chunks_of(tokens_of(golden.output), cuts, finish=golden.ends_by)
    return [event for chunk in chunks if not parser.is_finished for event in parser.push(chunk)]


@pytest.mark.parametrize("index", range(NUM_PARTS))
def test_messages_and_responses_hold_the_goldens_for_random_chunks(index):
    for number, golden in enumerate(GOLDENS[index::NUM_PARTS]):
        rng = random.Random(1000 * index + number)
        ids = tokens_of(golden.output)
        cuts = sorted(rng.sample(range(len(ids)), rng.randrange(len(ids))))
        for many in ([], cuts):
            events = events_of(MESSAGES, messages_body(golden), golden, many)
            seen = messages_of_events(json.loads(event.to_json()) for event in events)
            message = recipe.MessagesResponse("id", "m", 0, 1, 0)
            for event in events:
                message.accumulate(event)
            check_family(golden, seen, messages_of_body(json.loads(message.to_json())), MESSAGES_ENDS)

            texts = [json.loads(e.to_json()) for e in events_of(RESPONSES, responses_body(golden), golden, many)]
            whole = responses_of_body(texts[-1]["response"])
            check_family(golden, responses_of_events(texts), whole, RESPONSES_ENDS)
