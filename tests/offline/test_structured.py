"""Constrained answers through LLM."""

import json

import pytest

from dsv4_cluster import LLM, SamplingParams, StructuredSpec
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.output import FinishReason

SCHEMA = json.dumps(
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
)


@pytest.fixture(scope="module")
def llm(toy_dir) -> LLM:
    return LLM(toy_dir, num_pages=16, max_num_seqs=8)


def test_every_answer_of_a_prompt_follows_the_schema(llm):
    spec = StructuredSpec(kind="json_schema", schema=SCHEMA)

    outputs = llm.generate("Is it so?", SamplingParams(structured=spec, max_tokens=120, n=3, seed=4))[0].outputs

    ended = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert ended
    assert all(isinstance(json.loads(output.text)["ok"], bool) for output in ended)


def test_a_grammar_starts_behind_the_thoughts(llm):
    params = SamplingParams(
        structured=StructuredSpec(kind="regex", schema="(yes|no)"), thinking_budget=6, max_tokens=40, seed=1
    )

    text = llm.generate("<think>", params)[0].text

    assert text.rpartition("</think>")[2] in ("yes", "no")


def test_the_vocabulary_is_ready_before_the_time_of_a_grammar_starts(toy_dir, monkeypatch):
    llm = LLM(toy_dir, num_pages=4, max_num_seqs=1)
    add = llm.engine.add
    was_ready: list[bool] = []
    monkeypatch.setattr(
        llm.engine, "add", lambda request: was_ready.append(llm.engine._constraints._cache is not None) or add(request)
    )

    llm.generate("one", SamplingParams(structured=StructuredSpec(kind="json_object"), max_tokens=1))

    assert was_ready == [True]


def test_a_bad_grammar_is_refused_before_anything_runs(llm):
    bad = SamplingParams(structured=StructuredSpec(kind="lark", schema="start: nothing"))

    with pytest.raises(InvalidRequestError, match="Lark grammar"):
        llm.generate(["one", "two"], [SamplingParams(), bad])
    assert not llm.engine.has_work()
