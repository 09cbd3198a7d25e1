"""Where a constraint cannot be followed: every way there ends in a typed error, never in a token that breaks it."""

import json

import numpy as np
import pytest
import torch

from dsv4_cluster.engine.sampling_rows import SamplingRows
from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams, StructuredSpec
from dsv4_cluster.structured.grammar import CompiledGrammar
from dsv4_cluster.structured.matcher import MAX_ROLLBACK_TOKENS, Matcher, Phase
from dsv4_cluster.structured.vocabulary import GrammarVocabulary
from dsv4_cluster.structured.walk import DraftWalk
from tests.kit.codec import load_codec
from tests.kit.grammar_walk import EOS, allowed_ids, draw, fresh_matcher, load_vocabulary

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])


@pytest.fixture
def vocab_size() -> int:
    return 512


@pytest.fixture
def token_id():
    """token_id(b"a"): the token of one byte."""
    vocabulary = load_vocabulary()
    return {vocabulary.token_bytes(i): i for i in range(512) if len(vocabulary.token_bytes(i)) == 1}.__getitem__


@pytest.fixture
def broken(compile_grammar, token_id) -> Matcher:
    """A matcher two tokens into its answer, whose parser the library has given up."""
    matcher = fresh_matcher(compile_grammar("regex", "[ab]{9}"))
    for _ in range(2):
        matcher.accept(token_id(b"a"))
    assert not matcher._state.parser.consume_token(token_id(b"x")) and matcher._state.parser.is_error()
    return matcher


def test_a_lost_parser_gives_no_mask_takes_no_token_and_does_not_go_back(broken, token_id):
    """The library answers on in that state, as if EOS were the one token allowed."""
    calls = [
        lambda: broken.mask(np.empty(load_vocabulary().num_words, dtype=np.int32)),
        lambda: broken.accept(token_id(b"a")),
        lambda: broken.accept(EOS),
        lambda: broken.rollback(1),
    ]

    for call in calls:
        with pytest.raises(InvalidRequestError, match="cannot be followed further"):
            call()


def test_a_token_that_the_parser_fails_on_does_not_count_as_taken(monkeypatch, compile_grammar, token_id):
    matcher = fresh_matcher(compile_grammar("regex", "[ab]{9}"))
    matcher.accept(token_id(b"a"))
    monkeypatch.setattr(Matcher, "accepts", lambda matcher, token_id: True)  # as if its limits were met in between

    with pytest.raises(InvalidRequestError, match="cannot be followed further"):
        matcher.accept(token_id(b"x"))

    assert len(matcher._history) == 1


def test_a_walk_with_a_lost_parser_keeps_its_rows_and_names_the_error(compile_grammar, token_id):
    matcher = fresh_matcher(compile_grammar("regex", "[ab]{9}"))
    a, b = token_id(b"a"), token_id(b"b")
    walk = DraftWalk(matcher, 512)
    before = walk.rows([a])

    matcher._state.parser.consume_token(token_id(b"x"))

    assert len(walk.rows([a, b, a])) == len(before) == 2
    assert isinstance(walk.error, InvalidRequestError)
    assert len(walk.rows([b])) == 1  # what lies beside the way cannot be known any more


def test_a_vocabulary_that_cannot_spell_the_answer_ends_in_a_typed_error(rng, token_id):
    class Incomplete:
        """The real tokenizer, without any token that holds one of the bytes."""

        def __init__(self, missing: bytes) -> None:
            self._missing = missing

        def __getattr__(self, name):
            return getattr(load_codec(512).text, name)

        def token_bytes(self, index: int) -> bytes:
            spelling = load_codec(512).text.token_bytes(index)
            return b"" if set(spelling) & set(self._missing) else spelling

    vocabulary = GrammarVocabulary(Incomplete(b"z"), vocab_size=512, eos_token_id=EOS)
    matcher = fresh_matcher(CompiledGrammar(StructuredSpec(kind="regex", schema="ab(z|zz)c"), vocabulary))

    with pytest.raises(InvalidRequestError, match="answer"):
        for _ in range(5):
            matcher.accept(draw(matcher, vocabulary, rng))


@pytest.mark.parametrize(("kind", "schema"), [("json_object", ""), ("regex", "(ab){1,30}"), ("tool_call", TOOLS)])
def test_a_token_outside_the_mask_is_refused_and_moves_nothing(compile_grammar, rng, kind, schema):
    vocabulary = load_vocabulary()
    matcher = fresh_matcher(compile_grammar(kind, schema))

    for _ in range(12):
        allowed = allowed_ids(matcher, vocabulary)
        refused = [i for i in range(512) if not matcher.accepts(i)]
        assert set(refused).isdisjoint(allowed)
        with pytest.raises(InvalidRequestError, match="breaks the constraint"):
            matcher.accept(rng.choice(refused))
        assert allowed_ids(matcher, vocabulary) == allowed
        choice = rng.choice([i for i in allowed if i != EOS] or allowed)
        matcher.accept(choice)
        if choice == EOS:
            break


def test_eos_inside_a_grammar_is_refused_and_after_the_answer_the_only_token(compile_grammar, token_id):
    vocabulary = load_vocabulary()
    matcher = fresh_matcher(compile_grammar("regex", "ab"))

    for byte in (b"a", b"b"):
        with pytest.raises(InvalidRequestError):
            matcher.accept(EOS)
        matcher.accept(token_id(byte))
    matcher.accept(EOS)

    assert matcher.phase is Phase.DONE and allowed_ids(matcher, vocabulary) == [EOS]
    with pytest.raises(InvalidRequestError):
        matcher.accept(token_id(b"a"))
    matcher.accept(EOS)
    matcher.rollback(2)
    assert allowed_ids(matcher, vocabulary) == [EOS] and matcher.phase is Phase.GRAMMAR


def test_going_back_beyond_what_was_taken_is_an_error_of_the_caller(compile_grammar, token_id):
    matcher = fresh_matcher(compile_grammar("regex", "[ab]{200}"))
    matcher.accept(token_id(b"a"))

    with pytest.raises(AssertionError, match=r"\(2, 1\)"):
        matcher.rollback(2)
    for _ in range(MAX_ROLLBACK_TOKENS + 5):
        matcher.accept(token_id(b"b"))
    with pytest.raises(AssertionError, match=str(MAX_ROLLBACK_TOKENS + 1)):
        matcher.rollback(MAX_ROLLBACK_TOKENS + 1)


@pytest.mark.parametrize(("kind", "schema", "thinking"), [("json_object", "", True), ("tool_call", TOOLS, True)])
def test_random_walks_always_find_a_token_that_is_then_taken(compile_grammar, rng, kind, schema, thinking):
    vocabulary, grammar = load_vocabulary(), compile_grammar(kind, schema)

    for _ in range(6):
        matcher = fresh_matcher(grammar, thinking=thinking)
        matcher.accept(vocabulary.think_end_token_id)
        for _ in range(60):
            matcher.accept(draw(matcher, vocabulary, rng))  # EOS again and again once the answer has ended


def _row(vocabulary, thinking_budget, token_ids, mask):
    """The sampler row of a request that thinks and has a budget, under a mask."""
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(5, 6),
        sampling=SamplingParams(max_tokens=50),
        structured=StructuredSpec(kind="tool_call", schema=TOOLS),
        thinking=True,
        thinking_budget=thinking_budget,
    )
    rows = SamplingRows(eos_token_id=EOS, think_end_token_id=vocabulary.think_end_token_id, device=torch.device("cpu"))
    return rows.row(Sequence(request, [5, 6, *token_ids]), allowed_mask=None if mask is None else torch.tensor(mask))


def test_a_spent_thinking_budget_forces_no_token_that_the_grammar_would_refuse(compile_grammar):
    """A tool block that opens inside the thoughts ends them: the budget counts no further, the grammar decides."""
    vocabulary = load_vocabulary()
    codec = load_codec(512)
    matcher = fresh_matcher(compile_grammar("tool_call", TOOLS), thinking=True)
    ids = codec.chat.tokenizer.encode("so <｜DSML｜tool_calls>")
    budget = len(ids) - 1

    forced = []
    for index, token_id in enumerate(ids):
        walk = DraftWalk(matcher, 512)
        (mask,) = walk.rows([])
        forced.append(_row(vocabulary, budget, ids[:index], mask).forced_token_id)
        matcher.accept(token_id)
    (mask,) = DraftWalk(matcher, 512).rows([])

    end = vocabulary.think_end_token_id
    assert forced == [None] * budget + [end]  # still a thought in front of the token that completes the tag
    assert _row(vocabulary, budget, ids, mask).forced_token_id is None
    with pytest.raises(InvalidRequestError):
        matcher.accept(end)
