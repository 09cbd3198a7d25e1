"""Whatever is drawn from the masks, the finished text has the form that was asked for."""

import json
import re
from typing import Any

import pytest

from tests.kit.grammar_walk import EOS, allowed_ids, fresh_matcher, load_vocabulary, text_of, walk

NUM_WALKS = 12
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["red", "grün", "｜DSML"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
    },
    "required": ["id", "kind", "tags", "note"],
    "additionalProperties": False,
}


def _conforms(value: Any) -> bool:
    return (
        list(value) == ["id", "kind", "tags", "note"]
        and isinstance(value["id"], int)
        and 0 <= value["id"] <= 9999
        and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        and 1 <= len(value["tags"]) <= 3
        and all(isinstance(tag, str) and len(tag) <= 8 for tag in value["tags"])
        and (value["note"] is None or len(value["note"]) <= 12)
    )


def _texts(grammar, vocab_size, rng) -> list[str]:
    vocabulary = load_vocabulary(vocab_size)
    answers = [walk(fresh_matcher(grammar), vocabulary, rng) for _ in range(NUM_WALKS)]
    finished = [text_of(ids, vocabulary) for ids in answers if ids is not None]
    assert len(finished) >= NUM_WALKS // 2, "too few answers came to an end"
    return finished


def test_finished_json_object_answers_are_objects(compile_grammar, vocab_size, rng):
    for text in _texts(compile_grammar("json_object"), vocab_size, rng):
        assert isinstance(json.loads(text), dict)


def test_finished_schema_answers_follow_the_schema(compile_grammar, vocab_size, rng):
    for text in _texts(compile_grammar("json_schema", json.dumps(SCHEMA)), vocab_size, rng):
        assert _conforms(json.loads(text)), text


@pytest.mark.parametrize("pattern", [r"[a-z]{3}-\d{2,4}", r"(yes|no|ja|nein)!?", r"日[一-鿿]{2}", r""" "[^"]*" | x"""])
def test_finished_regex_answers_match_in_full(compile_grammar, vocab_size, rng, pattern):
    for text in _texts(compile_grammar("regex", pattern), vocab_size, rng):
        assert re.fullmatch(pattern, text), text


def test_finished_lark_answers_are_sentences_of_the_grammar(compile_grammar, vocab_size, rng):
    grammar = compile_grammar("lark", 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/')

    for text in _texts(grammar, vocab_size, rng):
        assert re.fullmatch(r"\(*\d{1,3}\)*", text) and text.count("(") == text.count(")")


def test_special_tokens_are_never_allowed_in_text(compile_grammar, vocab_size, rng):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("regex", r"(.|\n)*"))

    for _ in range(8):
        ids = allowed_ids(matcher, vocabulary)
        assert vocabulary.special_token_ids.intersection(ids) <= {EOS}
        matcher.accept(rng.choice([i for i in ids if i != EOS]))


def test_eos_is_allowed_exactly_when_the_text_is_complete(compile_grammar, vocab_size):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("regex", "[0-9]{2,3}"))
    digit = next(i for i in range(3, vocab_size) if vocabulary.token_bytes(i) == b"7")

    allowed = []
    for _ in range(4):
        ids = allowed_ids(matcher, vocabulary)
        allowed.append((EOS in ids, ids == [EOS], matcher.is_finished))
        if ids != [EOS]:
            matcher.accept(digit)

    assert allowed == [(False, False, False), (False, False, False), (True, False, False), (True, True, True)]


def test_ordinary_tokens_never_spell_the_dsml_mark(compile_grammar, vocab_size):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("json_object"))
    spelled = '{"｜DSML'.encode() + "｜".encode()[:2]
    single = {vocabulary.token_bytes(i): i for i in range(vocab_size) if len(vocabulary.token_bytes(i)) == 1}

    for byte in spelled:
        matcher.accept(single[bytes([byte])])

    assert single["｜".encode()[2:]] not in allowed_ids(matcher, vocabulary)


def test_a_grammar_that_demands_the_spelling_of_the_mark_gets_it(compile_grammar, vocab_size, rng):
    grammar = compile_grammar("json_schema", json.dumps({"const": "x｜DSML｜y"}))

    assert json.loads(_texts(grammar, vocab_size, rng)[0]) == "x｜DSML｜y"


def test_ids_beyond_the_tokenizer_are_never_allowed():
    from dsv4_cluster.protocol.request import StructuredSpec
    from dsv4_cluster.structured.grammar import CompiledGrammar
    from dsv4_cluster.structured.vocabulary import GrammarVocabulary
    from tests.kit.codec import load_codec

    padded = GrammarVocabulary(load_codec(512).text, vocab_size=600, eos_token_id=EOS)
    grammar = CompiledGrammar(StructuredSpec(kind="regex", schema=r"(.|\n)*"), padded)

    assert max(allowed_ids(fresh_matcher(grammar), padded)) < 512
