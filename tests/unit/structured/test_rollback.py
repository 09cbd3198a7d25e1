"""A matcher rolled back is a matcher that never went there, in every phase."""

import json

import numpy as np
import pytest

from dsv4_cluster.structured.matcher import MAX_ROLLBACK_TOKENS, Phase
from dsv4_cluster.structured.walk import DraftWalk
from tests.kit.grammar_walk import EOS, allowed_ids, draw, fresh_matcher, load_vocabulary

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])
CASES = [
    ("json_object", "", False),
    ("regex", "[ab]{5,40}", False),
    ("tool_call_required", TOOLS, False),
    ("tool_call", TOOLS, False),
    ("tool_call", TOOLS, True),
    ("json_object", "", True),
]


@pytest.fixture
def vocab_size() -> int:
    return 512


def _draw(matcher, vocabulary, rng, *, allow_eos=True) -> int:
    """Random, but it leaves the thoughts and opens tool blocks now and then."""
    ids = allowed_ids(matcher, vocabulary)
    turns = [i for i in (vocabulary.think_end_token_id, vocabulary.dsml_token_id) if i in ids]
    if turns and rng.random() < 0.3:
        return rng.choice(turns)
    less = [i for i in ids if vocabulary.token_bytes(i).endswith(b"<")]
    if matcher.phase in (Phase.TEXT, Phase.THINKING) and less and rng.random() < 0.3:
        return rng.choice(less)
    token_id = draw(matcher, vocabulary, rng)
    return token_id if allow_eos or token_id != EOS or len(ids) == 1 else rng.choice([i for i in ids if i != EOS])


def _ids(row, vocabulary) -> list[int]:
    """Token ids of a row of a walk."""
    if row is None:
        return list(range(vocabulary.vocab_size))
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize(("kind", "schema", "thinking"), CASES)
def test_rollback_equals_a_fresh_matcher(compile_grammar, rng, kind, schema, thinking):
    grammar, vocabulary = compile_grammar(kind, schema), load_vocabulary()

    for _ in range(40):
        matcher, taken = fresh_matcher(grammar, thinking=thinking), []
        for _ in range(rng.randrange(1, 40)):
            token_id = _draw(matcher, vocabulary, rng)
            matcher.accept(token_id)
            taken.append(token_id)
            if token_id == EOS:
                break
        num_back = rng.randint(1, len(taken))
        matcher.rollback(num_back)
        fresh = fresh_matcher(grammar, thinking=thinking)
        for token_id in taken[: len(taken) - num_back]:
            fresh.accept(token_id)

        for _ in range(4):
            ids = allowed_ids(matcher, vocabulary)
            assert ids == allowed_ids(fresh, vocabulary)
            assert (matcher.phase, matcher.is_finished) == (fresh.phase, fresh.is_finished)
            token_id = _draw(matcher, vocabulary, rng)
            matcher.accept(token_id)
            fresh.accept(token_id)


@pytest.mark.parametrize(("kind", "schema", "thinking"), CASES)
def test_walking_drafts_gives_the_masks_of_every_row_and_moves_nothing(compile_grammar, rng, kind, schema, thinking):
    grammar, vocabulary = compile_grammar(kind, schema), load_vocabulary()

    for _ in range(20):
        matcher, scout = (fresh_matcher(grammar, thinking=thinking) for _ in range(2))
        for _ in range(rng.randrange(12)):
            token_id = _draw(matcher, vocabulary, rng, allow_eos=False)
            if token_id == EOS:
                break
            matcher.accept(token_id)
            scout.accept(token_id)
        expected, drafts = [allowed_ids(scout, vocabulary)], []
        for _ in range(3):
            drafts.append(_draw(scout, vocabulary, rng))
            scout.accept(drafts[-1])
            expected.append(allowed_ids(scout, vocabulary))
        before = allowed_ids(matcher, vocabulary)

        strangers = [_draw(matcher, vocabulary, rng)]
        walk = DraftWalk(matcher, vocabulary.vocab_size)
        steps = [drafts[:1], drafts, strangers, [*strangers, *drafts], drafts[:2], drafts]
        rows = [walk.rows(step) for step in steps]
        walk.end()

        assert [_ids(row, vocabulary) for row in rows[-1]] == expected
        assert [_ids(row, vocabulary) for row in rows[-2]] == expected[:3]
        assert len(rows[0]) == 2 and all(row is None or row.any() for found in rows for row in found)
        assert walk.error is None and allowed_ids(matcher, vocabulary) == before


def test_rows_end_at_the_first_refused_draft(compile_grammar, rng):
    vocabulary = load_vocabulary()
    matcher = fresh_matcher(compile_grammar("regex", "[ab]{9}"))
    a, x = (next(i for i in range(512) if vocabulary.token_bytes(i) == text) for text in (b"a", b"x"))

    walk = DraftWalk(matcher, vocabulary.vocab_size)

    assert [len(walk.rows(drafts)) for drafts in ([a, a, x, a], [x], [a, a, a])] == [3, 1, 4]


@pytest.mark.parametrize(("kind", "schema", "thinking"), CASES)
def test_a_copy_goes_its_own_way(compile_grammar, rng, kind, schema, thinking):
    vocabulary = load_vocabulary()
    matcher = fresh_matcher(compile_grammar(kind, schema), thinking=thinking)
    for _ in range(5):
        matcher.accept(_draw(matcher, vocabulary, rng, allow_eos=False))
    before = allowed_ids(matcher, vocabulary)

    twin = matcher.copy()
    for _ in range(3):
        twin.accept(_draw(twin, vocabulary, rng))

    assert allowed_ids(matcher, vocabulary) == before


def test_the_longest_promised_rollback_works(compile_grammar, rng):
    vocabulary = load_vocabulary()
    matcher = fresh_matcher(compile_grammar("regex", "[ab]{200}"))
    start = allowed_ids(matcher, vocabulary)
    a = next(i for i in range(512) if vocabulary.token_bytes(i) == b"a")

    for _ in range(MAX_ROLLBACK_TOKENS):
        matcher.accept(a)
    matcher.rollback(MAX_ROLLBACK_TOKENS)

    assert allowed_ids(matcher, vocabulary) == start
