"""Schemas whose references lead deep are refused before native code follows them."""

import multiprocessing

import pytest

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.schema_references import MAX_REFERENCE_LEVELS
from dsv4_cluster.tokenizer.family import CHAT
from dsv4_cluster.tokenizer.messages_family import MESSAGES
from dsv4_cluster.tokenizer.responses_family import RESPONSES
from tests.kit.codec import CONTEXT_LIMIT, NAMES, load_codec

BODY = {"model": NAMES[0], "messages": [{"role": "user", "content": "json"}], "max_tokens": 5}
INPUT = {"model": NAMES[0], "input": "json"}
FAMILIES = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}


def _chain(num_links, *, is_object=True):
    """An object whose property, or a text that, is defined by so many references in a row."""
    links = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(num_links)}
    definitions = {**links, f"a{num_links}": {"type": "string"}}
    first = {"$ref": "#/$defs/a0"}
    own = {"type": "object", "properties": {"x": first}} if is_object else first
    return {**own, "$defs": definitions}


def _bodies(schema):
    function = {"name": "f", "parameters": schema}
    return {
        "chat tools": ("chat", {**BODY, "tools": [{"type": "function", "function": function}]}),
        "chat format": (
            "chat",
            {**BODY, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        ),
        "messages tools": ("messages", {**BODY, "tools": [{"name": "f", "input_schema": schema}]}),
        "messages format": (
            "messages",
            {**BODY, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "responses tools": ("responses", {**INPUT, "tools": [{"type": "function", **function}]}),
        "responses format": (
            "responses",
            {**INPUT, "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        ),
    }


CASES = sorted(_bodies({}))


@pytest.mark.parametrize("case", CASES)
def test_a_chain_of_references_that_native_code_cannot_follow_is_refused(case):
    family, body = _bodies(_chain(3000))[case]

    with pytest.raises(InvalidRequestError, match=f"at most {MAX_REFERENCE_LEVELS} are followed"):
        load_codec().chat.encode(body, context_limit=CONTEXT_LIMIT, family=FAMILIES[family])


@pytest.mark.parametrize("case", CASES)
def test_a_chain_of_references_of_a_real_schema_is_encoded(case):
    family, body = _bodies(_chain(50))[case]

    assert load_codec().chat.encode(body, context_limit=CONTEXT_LIMIT, family=FAMILIES[family]).token_ids


def _encode_all():
    for is_object in (True, False):
        for family, body in _bodies(_chain(240, is_object=is_object)).values():
            try:
                load_codec().chat.encode(body, context_limit=100_000, family=FAMILIES[family])
            except InvalidRequestError as err:
                assert "are followed" not in str(err), err


def test_a_process_that_encodes_the_deepest_allowed_chain_goes_on():
    """In a process of its own: where a limit is missing, it ends without an exception."""
    run = multiprocessing.get_context("spawn").Process(target=_encode_all)
    run.start()
    run.join()

    assert run.exitcode == 0
