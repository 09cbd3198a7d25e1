"""Constrained answers of the engine with random weights: whatever ends by itself has the form that was asked for."""

import json
import re

import pytest

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.engine.constraints import Constraints
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.output import FinishReason
from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.tokenizer.text import TextTokenizer

EOS = 1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["red", "green"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
)
REGEX = StructuredSpec(kind="regex", schema="[ab]{2,4}(yes|no)")
TOOLS = StructuredSpec(
    kind="tool_call_required",
    schema=json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": "ping",
                    "strict": True,
                    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
                },
            }
        ]
    ),
)


@pytest.fixture(scope="module")
def tokenizer(toy_dir) -> TextTokenizer:
    return TextTokenizer.from_checkpoint(toy_dir)


@pytest.fixture
def ask(make_request):
    """ask(name, prompt, spec, thinking=, **sampling): a constrained request that samples."""

    def make(name, prompt, spec, *, thinking=False, min_tokens=0, token_ids=(), fields=None, **sampling):
        sampling = {"max_tokens": 160, "temperature": 1.0, "prompt_logprobs": None} | sampling
        fields = {"structured": spec, "thinking": thinking} | (fields or {})
        return make_request(
            name, prompt, ignore_eos=False, min_tokens=min_tokens, token_ids=token_ids, fields=fields, **sampling
        )

    return make


def _text(tokenizer, token_ids) -> str:
    return tokenizer.decode(i for i in token_ids if i != EOS)


def test_answers_that_stop_follow_their_constraint(make_engine, ask, run, tokenizer):
    checks = {
        "regex": (REGEX, lambda text: re.fullmatch(REGEX.schema, text)),
        "schema": (
            StructuredSpec(kind="json_schema", schema=SCHEMA),
            lambda text: 0 <= json.loads(text)["n"] <= 99 and json.loads(text)["kind"] in ("red", "green"),
        ),
        "lark": (
            StructuredSpec(kind="lark", schema='start: "x" /[0-9]{3}/ "y"'),
            lambda text: re.fullmatch(r"x\d{3}y", text),
        ),
        "tools": (TOOLS, lambda text: text.startswith("\n\n<｜DSML｜tool_calls>") and text.endswith("tool_calls>")),
    }
    requests = [
        ask(f"{name}-{seed}", 5 + seed, spec, seed=seed, temperature=temperature)
        for name, (spec, _) in checks.items()
        for seed, temperature in enumerate((0.0, 1.0, 3.0))
    ]

    answers = run(make_engine(num_pages=32), *requests)

    stopped = [name for name, answer in answers.items() if answer.finish_reason is FinishReason.STOP]
    assert {name.split("-")[0] for name in stopped} == checks.keys()
    for name in stopped:
        text = _text(tokenizer, answers[name].token_ids)
        assert checks[name.split("-")[0]][1](text), text
    assert all(a.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for a in answers.values())


def test_an_answer_cut_by_max_tokens_ends_by_length(make_engine, ask, run):
    answer = run(make_engine(), ask("a", 9, REGEX, max_tokens=1))["a"]

    assert (answer.finish_reason, len(answer.token_ids)) == (FinishReason.LENGTH, 1)


def test_unconstrained_neighbours_are_not_touched(make_engine, make_request, ask, run):
    plain = make_request("plain", 12, temperature=1.0)

    alone = run(make_engine(), plain)["plain"]
    together = run(make_engine(), plain, ask("a", 9, REGEX))["plain"]

    assert alone.token_ids == together.token_ids


def test_a_preempted_answer_goes_on_under_its_constraint(make_engine, ask, run, tokenizer):
    spec = StructuredSpec(kind="regex", schema="[ab]{30}(yes|no)")
    requests = [ask(name, 240 + seed, spec, seed=seed, max_tokens=50) for seed, name in enumerate("abc")]

    roomy, tight = make_engine(num_pages=24), make_engine(num_pages=4)
    undisturbed, preempted = run(roomy, *requests), run(tight, *requests)

    assert tight.stats().num_preemptions > 0
    for name, answer in preempted.items():
        assert answer.token_ids == undisturbed[name].token_ids
        assert re.fullmatch(spec.schema, _text(tokenizer, answer.token_ids))


def test_a_handed_over_answer_goes_on_under_its_constraint(make_engine, ask, run, step_until_chunk, tokenizer):
    request = ask("a", 40, REGEX)
    whole = run(make_engine(), request)["a"]

    prefill, decode = make_engine(), make_engine()
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill)
    export = prefill.export_sequence("a")
    prefill.abort("a")
    assert decode.import_sequence(request, first.token_ids[0], export.segments)
    token_ids = [*first.token_ids]
    while decode.has_work():
        token_ids += [token_id for chunk in decode.step().chunks for token_id in chunk.token_ids]

    assert token_ids == whole.token_ids
    assert re.fullmatch(REGEX.schema, _text(tokenizer, token_ids))
    prefill.check()
    decode.check()


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "spec", [REGEX, StructuredSpec(kind="json_schema", schema=SCHEMA), TOOLS], ids=lambda s: s.kind
)
def test_speculation_changes_no_constrained_answer(make_engine, ask, run, spec, thinking):
    fields = {"thinking_budget": 5} if thinking else {}
    requests = [
        ask(f"a{seed}", 20 + seed, spec, thinking=thinking, fields=fields, seed=seed, max_tokens=40)
        for seed in range(2)
    ]

    plain = run(make_engine(), *requests)
    engine = make_engine(num_draft_tokens=3)
    drafted = run(engine, *requests)

    assert engine.stats().total_accepted_tokens > 0
    for name, answer in drafted.items():
        assert (answer.token_ids, answer.finish_reason) == (plain[name].token_ids, plain[name].finish_reason)


def test_thoughts_are_free_and_the_answer_behind_them_is_not(make_engine, ask, run, tokenizer):
    answers = run(
        make_engine(num_pages=32),
        *(ask(f"a{seed}", 9, REGEX, thinking=True, fields={"thinking_budget": 12}, seed=seed) for seed in range(4)),
    )

    for answer in answers.values():
        thoughts, _, text = tokenizer.decode(answer.token_ids).partition("</think>")
        assert answer.finish_reason is FinishReason.STOP and len(thoughts) > 0
        assert re.fullmatch(REGEX.schema, text.removesuffix(tokenizer.decode([EOS]))), text


def test_thoughts_do_not_depend_on_the_constraint(make_engine, ask, run):
    kinds = [REGEX, StructuredSpec(kind="json_object")]

    first, second = (
        run(make_engine(), ask("a", 9, spec, thinking=True, max_tokens=12, seed=5))["a"].token_ids for spec in kinds
    )

    assert first == second


def test_min_tokens_gives_way_to_the_end_of_a_grammar(make_engine, ask, run, tokenizer):
    answer = run(make_engine(), ask("a", 9, REGEX, min_tokens=40))["a"]

    assert answer.finish_reason is FinishReason.STOP
    assert re.fullmatch(REGEX.schema, _text(tokenizer, answer.token_ids))


def test_a_bad_grammar_ends_its_own_request_only(make_engine, make_request, ask, run):
    bad = ask("bad", 9, StructuredSpec(kind="regex", schema="(a"))

    answers = run(make_engine(), bad, make_request("good", 9))

    error = answers["bad"].chunks[-1].error
    assert isinstance(error, InvalidRequestError) and "regular expression" in error.message
    assert answers["bad"].finish_reason is FinishReason.ERROR and not answers["bad"].token_ids
    assert answers["good"].finish_reason is FinishReason.LENGTH


def test_a_grammar_that_no_text_completes_runs_to_max_tokens(make_engine, ask, run):
    endless = StructuredSpec(kind="lark", schema='start: "a" x\nx: "b" x')

    answer = run(make_engine(), ask("a", 9, endless, max_tokens=20))["a"]

    assert answer.finish_reason is not FinishReason.STOP


def test_ignore_eos_contradicts_a_constraint(make_engine, make_request):
    engine = make_engine()

    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        engine.add(make_request("a", 9, fields={"structured": REGEX}))
    engine.check()
    assert not engine.has_work()


def test_aborted_requests_leave_no_constraint_behind(make_engine, ask):
    engine = make_engine()
    for name in "abc":
        engine.add(ask(name, 9, REGEX))

    engine.abort("a")
    engine.step()
    engine.abort("b")
    engine.abort("c")

    engine.check()
    assert not engine.has_work()


def test_mask_rows_follow_the_drafts_up_to_the_first_refused_one(toy_dir, toy_model, ask, tokenizer):
    constraints = Constraints(
        toy_dir, vocab_size=512, eos_token_id=EOS, device=toy_model.device, clock=MonotonicClock()
    )
    constraints.add(ask("a", 9, REGEX))
    constraints.wait(10)
    a, x = (tokenizer.encode(text)[0] for text in "ax")

    rows = constraints.mask_rows("a", [a, a, x, a])
    again = constraints.mask_rows("a", [])

    assert [rows.row(i) is None for i in range(5)] == [False, False, False, True, True]
    assert again.row(0).tolist() == rows.row(0).tolist() != rows.row(2).tolist()
    assert constraints.mask_rows("other", [a]).row(0) is None
