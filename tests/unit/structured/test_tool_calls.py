"""Tool calls drawn from the masks are read by the official output parser as calls of the given tools."""

import json
import random

import pytest

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.output import FinishReason
from dsv4_cluster.structured.matcher import Phase
from dsv4_cluster.tokenizer.chat_output import ChatMessage, ChatParser
from tests.kit.codec import CONTEXT_LIMIT, NAMES, chunks_of, load_codec
from tests.kit.grammar_walk import EOS, allowed_ids, draw, fresh_matcher, load_vocabulary, text_of, walk

LOOSE = [
    {"type": "function", "function": {"name": "ping"}},
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    },
]
STRICT = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome", ""]},
                    "note": {"type": "string", "minLength": 2, "maxLength": 6},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"anyOf": [{"type": "string", "enum": ["C", "F"]}, {"type": "integer", "enum": [0]}]},
                    "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
                },
                "required": ["city", "note", "days", "unit", "code"],
                "additionalProperties": False,
            },
        },
    }
]
MARK = "｜DSML｜"


def _body(tools, **fields):
    return {"model": NAMES[0], "messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}


def _parse(token_ids, vocab_size, body):
    """The first choice that the official parser makes of an answer."""
    codec = load_codec(vocab_size)
    prompt = codec.chat.encode(body, context_limit=CONTEXT_LIMIT)
    parser = ChatParser(codec.chat, prompt, response_id="id", eos_token_id=EOS)
    message = ChatMessage(parser, prompt, response_id="id")
    for chunk in chunks_of(token_ids[:-1], finish=FinishReason.STOP):
        message.push(chunk)
    return message.body()["choices"][0]


def _accept_text(matcher, vocab_size, text):
    for token_id in load_codec(vocab_size).chat.tokenizer.encode(text):
        matcher.accept(token_id)


def _finish(matcher, vocabulary, rng) -> list[int]:
    """The rest of an answer that comes to an end."""
    answers = (walk(matcher.copy(), vocabulary, rng) for _ in range(50))
    return next(ids for ids in answers if ids is not None)


def _calls(choice) -> list[tuple[str, dict]]:
    assert choice["finish_reason"] == "tool_calls"
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def _is_weather(arguments: dict) -> bool:
    city, note, days, unit, code = arguments.values()
    return (
        list(arguments) == ["city", "note", "days", "unit", "code"]
        and city in ("Paris", "Rome", "")
        and 2 <= len(note) <= 6
        and 1 <= days <= 9
        and unit in ("C", "F", 0)
        and len(code) == 3
        and code.isupper()
    )


@pytest.mark.parametrize("tools", [LOOSE, STRICT], ids=["loose", "strict"])
def test_finished_required_calls_parse_as_calls_of_the_tools(compile_grammar, vocab_size, rng, tools):
    vocabulary = load_vocabulary(vocab_size)
    grammar = compile_grammar("tool_call_required", json.dumps(tools))
    body = _body(tools, thinking={"type": "disabled"}, tool_choice="required")
    prompt = load_codec(vocab_size).chat.encode(body, context_limit=CONTEXT_LIMIT)
    names = {tool["function"]["name"] for tool in tools}

    answers = [
        walk(fresh_matcher(grammar, prompt_token_ids=prompt.token_ids), vocabulary, rng, max_tokens=600)
        for _ in range(10)
    ]

    finished = [ids for ids in answers if ids is not None]
    assert len(finished) >= 4
    for ids in finished:
        calls = _calls(_parse(ids, vocab_size, body))
        assert {name for name, _ in calls} <= names
        assert tools is LOOSE or all(_is_weather(arguments) for _, arguments in calls)


def test_a_required_call_opens_the_block_itself_where_the_prompt_does_not(compile_grammar, vocab_size, rng):
    vocabulary = load_vocabulary(vocab_size)
    grammar = compile_grammar("tool_call_required", json.dumps(LOOSE))

    for thinking in (False, True):
        matcher = fresh_matcher(grammar, thinking=thinking)
        if thinking:
            matcher.accept(vocabulary.think_end_token_id)
        answer = _finish(matcher, vocabulary, rng)
        assert text_of(answer, vocabulary).startswith(f"\n\n<{MARK}tool_calls>\n<{MARK}invoke name=")


def test_a_single_call_closes_the_block_where_another_could_follow(compile_grammar, vocab_size):
    one = f'\n\n<{MARK}tool_calls>\n<{MARK}invoke name="ping">\n</{MARK}invoke>\n'
    further = f'<{MARK}invoke name="ping">\n</{MARK}invoke>\n'
    closing = f"</{MARK}tool_calls>"

    for is_single_call in (False, True):
        grammar = compile_grammar("tool_call_required", json.dumps(LOOSE), is_single_call=is_single_call)
        matcher = fresh_matcher(grammar)
        _accept_text(matcher, vocab_size, one)
        if is_single_call:
            with pytest.raises(InvalidRequestError):
                _accept_text(matcher.copy(), vocab_size, further)
        else:
            _accept_text(matcher, vocab_size, further)
        _accept_text(matcher, vocab_size, closing)
        assert matcher.accepts(EOS)


def test_auto_is_free_text_and_may_end_at_any_token(compile_grammar, vocab_size, rng):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("tool_call", json.dumps(LOOSE)))

    for _ in range(20):
        ids = allowed_ids(matcher, vocabulary)
        ordinary = vocab_size - len(vocabulary.special_token_ids)
        assert EOS in ids and ordinary <= len(ids) <= ordinary + 2
        matcher.accept(rng.choice([i for i in ids if i not in (EOS, vocabulary.dsml_token_id)]))

    assert matcher.phase is Phase.TEXT


def test_auto_allows_the_mark_only_after_a_less_sign(compile_grammar, vocab_size):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("tool_call", json.dumps(LOOSE)))

    before = vocabulary.dsml_token_id in allowed_ids(matcher, vocabulary)
    _accept_text(matcher, vocab_size, "see 2 <")

    assert (before, vocabulary.dsml_token_id in allowed_ids(matcher, vocabulary)) == (False, True)


@pytest.mark.parametrize("tools", [LOOSE, STRICT], ids=["loose", "strict"])
def test_auto_is_constrained_once_a_block_opens(compile_grammar, vocab_size, rng, tools):
    vocabulary = load_vocabulary(vocab_size)
    grammar = compile_grammar("tool_call", json.dumps(tools))
    opening = f"Let me see.\n\n<{MARK}"
    body = _body(tools, thinking={"type": "disabled"})

    finished = []
    for _ in range(8):
        matcher = fresh_matcher(grammar)
        _accept_text(matcher, vocab_size, opening)
        assert matcher.phase is Phase.GRAMMAR
        rest = walk(matcher, vocabulary, rng, max_tokens=600)
        if rest is not None:
            finished.append([*load_codec(vocab_size).chat.tokenizer.encode(opening), *rest])

    assert len(finished) >= 2
    for ids in finished:
        choice = _parse(ids, vocab_size, body)
        assert choice["message"]["content"].strip() == "Let me see."
        assert tools is LOOSE or all(_is_weather(arguments) for _, arguments in _calls(choice))


def test_thoughts_are_free_and_the_constraint_starts_behind_them(compile_grammar, vocab_size):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("json_object"), thinking=True)

    _accept_text(matcher, vocab_size, f"<｜User｜> {MARK} }} 12 <think>")
    free = (matcher.is_free, len(allowed_ids(matcher, vocabulary)))
    matcher.accept(vocabulary.think_end_token_id)

    assert free == (True, vocab_size)
    assert all(vocabulary.token_bytes(i).startswith(b"{") for i in allowed_ids(matcher, vocabulary))


@pytest.mark.parametrize("kind", ["tool_call", "tool_call_required"])
@pytest.mark.parametrize("opening", [f"so <{MARK}tool_calls>", f"so <{MARK}tool_calls>\n"])
def test_a_block_inside_the_thoughts_ends_them(compile_grammar, vocab_size, rng, kind, opening):
    """The output parser takes such a block as the end of the thoughts, so its form must hold from there on."""
    vocabulary = load_vocabulary(vocab_size)
    grammar = compile_grammar(kind, json.dumps(LOOSE))
    codec = load_codec(vocab_size)

    matcher = fresh_matcher(grammar, thinking=True)
    _accept_text(matcher, vocab_size, opening)
    assert matcher.phase is Phase.GRAMMAR
    rest = _finish(matcher, vocabulary, rng)

    choice = _parse([*codec.chat.tokenizer.encode(opening), *rest], vocab_size, _body(LOOSE))
    assert choice["message"]["reasoning_content"].strip() == "so" and _calls(choice)


def test_markup_that_opens_no_block_stays_a_thought(compile_grammar, vocab_size):
    matcher = fresh_matcher(compile_grammar("tool_call", json.dumps(LOOSE)), thinking=True)

    _accept_text(matcher, vocab_size, f"first <{MARK}invoke> or <{MARK}toolcalls>x")

    assert matcher.phase is Phase.THINKING


def test_the_answer_ends_when_the_block_closes(compile_grammar, vocab_size):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("tool_call_required", json.dumps(LOOSE)))

    invoke = f'<{MARK}invoke name="ping">\n</{MARK}invoke>'
    _accept_text(matcher, vocab_size, f"\n\n<{MARK}tool_calls>\n{invoke}\n{invoke}\n</{MARK}tool_calls>")

    assert allowed_ids(matcher, vocabulary) == [EOS] and matcher.is_finished


def test_a_raw_value_may_hold_anything_but_the_mark(compile_grammar, vocab_size):
    value = 'a </b> "c"\n{<\\ 日本 2>&1 </p'
    call = f'<{MARK}invoke name="add">\n<{MARK}parameter name="x" string="true">{value}</{MARK}parameter>\n'
    text = f"\n\n<{MARK}tool_calls>\n{call}</{MARK}invoke>\n</{MARK}tool_calls>"
    codec = load_codec(vocab_size)
    matcher = fresh_matcher(compile_grammar("tool_call", json.dumps(LOOSE)))

    _accept_text(matcher, vocab_size, text)
    matcher.accept(EOS)

    choice = _parse([*codec.chat.tokenizer.encode(text), EOS], vocab_size, _body(LOOSE, thinking={"type": "disabled"}))
    assert _calls(choice) == [("add", {"x": value})]


def test_unknown_tool_names_cannot_be_called(compile_grammar, vocab_size):
    vocabulary = load_vocabulary(vocab_size)
    matcher = fresh_matcher(compile_grammar("tool_call_required", json.dumps(LOOSE)))
    _accept_text(matcher, vocab_size, f'\n\n<{MARK}tool_calls>\n<{MARK}invoke name="')

    first_bytes = {vocabulary.token_bytes(i)[:1] for i in allowed_ids(matcher, vocabulary)}

    assert first_bytes == {b"p", b"a"}


def test_drawing_is_reproducible():
    """The walks of this folder depend on their seed only."""
    vocabulary = load_vocabulary()
    from dsv4_cluster.protocol.request import StructuredSpec
    from dsv4_cluster.structured.grammar import CompiledGrammar

    grammar = CompiledGrammar(StructuredSpec(kind="json_object"), vocabulary)

    assert len({draw(fresh_matcher(grammar), vocabulary, random.Random(7)) for _ in range(5)}) == 1
