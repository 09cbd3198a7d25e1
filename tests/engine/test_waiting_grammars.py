"""Nobody waits for a grammar but the request that brought it: not for compiling, not for a mask that takes long."""

import inspect
import itertools
import json
import threading
import time

import pytest

from dsv4_cluster.clock import ManualClock
from dsv4_cluster.engine.constraints import COMPILE_LIMIT_S, MASK_WAIT_S
from dsv4_cluster.errors import InvalidRequestError, OverloadedError
from dsv4_cluster.protocol.output import FinishReason
from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.structured.grammar import CompiledGrammar
from dsv4_cluster.structured.matcher import Matcher
from dsv4_cluster.tokenizer.text import TextTokenizer
from tests.kit.proposers import WrongAtProposer

SLOW = StructuredSpec(kind="regex", schema="[ab]{3,5}(yes|no)")
QUICK = StructuredSpec(kind="regex", schema="[cd]{3,5}(yes|no)")
WAIT_S = 20.0


@pytest.fixture(scope="module")
def tokenizer(toy_dir) -> TextTokenizer:
    return TextTokenizer.from_checkpoint(toy_dir)


@pytest.fixture
def gate(monkeypatch):
    """While it is closed, grammar SLOW is being compiled."""
    gate, compile_all = threading.Event(), CompiledGrammar.compile_all

    def compile_behind_the_gate(grammar: CompiledGrammar) -> None:
        if grammar.spec == SLOW:
            assert gate.wait(WAIT_S)
        compile_all(grammar)

    monkeypatch.setattr(CompiledGrammar, "compile_all", compile_behind_the_gate)
    yield gate
    gate.set()


@pytest.fixture
def mask_gate(monkeypatch):
    """Of grammar SLOW, the first mask takes long, and the others do not get done while it is closed."""
    gate, mask, num_masks = threading.Event(), Matcher.mask, itertools.count()

    def mask_behind_the_gate(matcher: Matcher, out) -> None:
        if matcher._grammar.spec == SLOW:
            gate.wait(2 * MASK_WAIT_S if next(num_masks) == 0 else WAIT_S)
        mask(matcher, out)

    monkeypatch.setattr(Matcher, "mask", mask_behind_the_gate)
    yield gate
    gate.set()


@pytest.fixture
def constrained(make_request):
    """constrained(name, prompt, spec): a request that samples under a constraint."""

    def make(name, prompt, spec=SLOW, **sampling):
        sampling = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "prompt_logprobs": None} | sampling
        return make_request(name, prompt, ignore_eos=False, fields={"structured": spec}, **sampling)

    return make


def step_to_the_end_of(engine, name, limit=200) -> tuple[list, int]:
    """Step until a request has finished. Returns: all chunks, and how many tokens were computed."""
    chunks, num_tokens = [], 0
    for _ in range(limit):
        output = engine.step()
        engine.check()
        chunks += output.chunks
        num_tokens += output.num_tokens
        if any(chunk.request_id == name and chunk.finish_reason for chunk in output.chunks):
            return chunks, num_tokens
    raise AssertionError(f"{name} did not finish within {limit} steps")


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_others_are_answered_while_a_grammar_is_compiled(
    gate, make_engine, make_request, constrained, run, num_draft_tokens
):
    requests = constrained("slow", 300), make_request("plain", 40), constrained("quick", 41, QUICK)
    engine = make_engine(num_draft_tokens=num_draft_tokens, max_num_batched_tokens=64)
    for request in requests:
        engine.add(request)

    chunks, num_tokens = step_to_the_end_of(engine, "plain")
    if engine.stats().num_running > 1:
        more, num_more = step_to_the_end_of(engine, "quick")
        chunks, num_tokens = chunks + more, num_tokens + num_more
    while num_tokens and engine.step().num_tokens:
        engine.check()
    computed = engine._sequences["slow"].num_computed_tokens
    gate.set()
    slow, _ = step_to_the_end_of(engine, "slow")

    assert {chunk.request_id for chunk in chunks} == {"plain", "quick"}
    assert computed == 299  # the whole prompt but its last token, which is what the first mask is needed for
    gate.set()
    plain = run(make_engine(max_num_batched_tokens=64), *requests)
    for name, answer in plain.items():
        assert answer.token_ids == [t for chunk in chunks + slow if chunk.request_id == name for t in chunk.token_ids]
    assert not engine.has_work()


def test_a_step_that_has_nothing_but_a_grammar_to_wait_for_returns_soon(gate, make_engine, constrained):
    engine = make_engine()
    engine.add(constrained("slow", 1))
    started = time.monotonic()

    outputs = [engine.step() for _ in range(5)]

    assert time.monotonic() - started < 1.0
    assert [(output.num_tokens, output.chunks) for output in outputs] == [(0, ())] * 5
    assert engine.has_work()


def test_a_prompt_that_continues_a_waiting_one_does_not_wait_with_it(gate, make_engine, make_request, constrained):
    engine = make_engine()
    shared = [17 + i % 100 for i in range(256)]
    engine.add(constrained("slow", shared))
    engine.step()

    engine.add(make_request("other", [*shared, 20, 21, 22]))
    chunks, _ = step_to_the_end_of(engine, "other")

    assert {chunk.request_id for chunk in chunks} == {"other"}


def test_a_handed_over_sequence_waits_for_its_grammar_without_holding_the_others(
    gate, make_engine, make_request, constrained, step_until_chunk, run
):
    gate.set()
    request = constrained("slow", 40)
    whole = run(make_engine(), request)["slow"]
    prefill, decode = make_engine(), make_engine()
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill)
    gate.clear()

    assert decode.import_sequence(request, first.token_ids[0], prefill.export_sequence("slow").segments)
    decode.add(make_request("plain", 30))
    chunks, _ = step_to_the_end_of(decode, "plain")
    gate.set()
    rest, _ = step_to_the_end_of(decode, "slow")

    assert {chunk.request_id for chunk in chunks} == {"plain"}
    assert [*first.token_ids, *(t for chunk in rest for t in chunk.token_ids)] == whole.token_ids


def test_a_grammar_that_is_not_compiled_in_time_ends_its_request_with_the_limit(
    gate, make_engine, make_request, constrained
):
    clock = ManualClock()
    engine = make_engine(clock=clock)
    engine.add(constrained("slow", 20))
    engine.add(make_request("plain", 20, max_tokens=200))
    clock.advance(COMPILE_LIMIT_S - 0.1)
    early = [chunk.request_id for _ in range(3) for chunk in engine.step().chunks]

    clock.advance(0.1)
    chunks = engine.step().chunks

    (error,) = [chunk.error for chunk in chunks if chunk.request_id == "slow"]
    assert isinstance(error, InvalidRequestError) and "10 s" in error.message and error.http_status == 400
    assert set(early) == {"plain"} and engine.stats().num_running == 1
    engine.check()


def slow_schema(name: str) -> StructuredSpec:
    """Seconds of native compiling that nothing can end."""
    properties = {f"{name}{i}": {"type": "integer"} for i in range(8000)}
    return StructuredSpec(kind="json_schema", schema=json.dumps({"type": "object", "properties": properties}))


def wait_until(is_so) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_while_slow_grammars_hold_all_threads_new_ones_are_refused_and_known_ones_answered(
    make_engine, constrained, run
):
    clock = ManualClock()
    engine = make_engine(clock=clock)
    known = run(engine, constrained("known", 20))["known"]
    for name in "ab":
        engine.add(constrained(name, 20, slow_schema(name)))
    jobs = [engine._constraints._constraints[name].matcher for name in "ab"]
    wait_until(lambda: all(job.running() for job in jobs))
    engine.add(constrained("queued", 20, QUICK))

    clock.advance(COMPILE_LIMIT_S)
    errors = {chunk.request_id: chunk.error for chunk in engine.step().chunks}
    with pytest.raises(OverloadedError, match="all 2 threads") as refusal:
        engine.add(constrained("new", 20, QUICK))
    again = run(engine, constrained("again", 20))["again"]
    were_held = not any(job.done() for job in jobs)
    wait_until(lambda: any(job.done() for job in jobs))
    late = run(engine, constrained("new", 20, QUICK))["new"]
    wait_until(lambda: all(job.done() for job in jobs))

    assert were_held
    assert {type(errors[name]) for name in "ab"} == {InvalidRequestError}
    assert isinstance(errors["queued"], OverloadedError)
    assert refusal.value.http_status == errors["queued"].http_status == 503 and refusal.value.retryable
    assert again.token_ids == known.token_ids
    assert late.finish_reason is FinishReason.STOP


def test_aborting_a_request_whose_grammar_is_compiled_frees_it_at_once(gate, make_engine, constrained, run):
    engine = make_engine()
    engine.add(constrained("slow", 300))
    engine.step()

    assert engine.abort("slow")

    engine.check()
    assert not engine.has_work() and engine.stats().free_pages == engine.stats().num_pages
    gate.set()
    assert run(engine, constrained("slow", 30))["slow"].finish_reason is FinishReason.STOP


def test_a_grammar_that_fails_while_others_run_ends_before_its_prompt_is_computed(
    make_engine, make_request, constrained
):
    engine = make_engine(max_num_batched_tokens=16)
    engine.add(make_request("plain", 20, max_tokens=100))
    engine.add(constrained("bad", 2000, StructuredSpec(kind="regex", schema="(a")))

    chunks, num_tokens = step_to_the_end_of(engine, "bad")

    (failed,) = [chunk for chunk in chunks if chunk.request_id == "bad"]
    assert isinstance(failed.error, InvalidRequestError) and not failed.token_ids
    assert num_tokens < 1000


def test_a_mask_that_takes_long_delays_its_own_answer_only(mask_gate, make_engine, make_request, constrained, run):
    requests = constrained("slow", 60), make_request("plain", 40, max_tokens=20), constrained("quick", 41, QUICK)
    engine = make_engine()
    for request in requests:
        engine.add(request)

    chunks, _ = step_to_the_end_of(engine, "plain")
    if engine.stats().num_running > 1:
        chunks += step_to_the_end_of(engine, "quick")[0]
    early = [chunk for chunk in chunks if chunk.request_id == "slow"]
    mask_gate.set()
    slow, _ = step_to_the_end_of(engine, "slow")

    assert len(early) <= 1  # the token of the first mask
    for name, answer in run(make_engine(), *requests).items():
        assert answer.token_ids == [t for chunk in chunks + slow if chunk.request_id == name for t in chunk.token_ids]


class OtherLetter:
    """Drafts a letter that the grammar SLOW takes, never the one that is right."""

    def __init__(self, num_prompt_tokens: int, answer: list[int], letters: tuple[int, int]) -> None:
        self._num_prompt_tokens, self._answer, self._letters = num_prompt_tokens, answer, letters

    def propose(self, rows):
        rights = [self._answer[len(row.token_ids) - self._num_prompt_tokens] for row in rows]
        return [[next(letter for letter in self._letters if letter != right)] for right in rights]


def test_a_parser_that_is_lost_behind_a_wrong_draft_is_not_missed(
    monkeypatch, make_engine, constrained, run, tokenizer
):
    """Plain decoding never goes there, so the answer must not end because of it."""
    expected = run(make_engine(), constrained("slow", 60))["slow"]
    letters = tuple(tokenizer.encode(letter)[0] for letter in "ab")
    accept, lost = Matcher.accept, []

    def accept_and_lose(matcher: Matcher, token_id: int) -> None:
        accept(matcher, token_id)
        if any(frame.function == "_follow" for frame in inspect.stack(0)):
            lost.append(matcher._state.parser.consume_token(0))  # BOS is refused: an error for good

    monkeypatch.setattr(Matcher, "accept", accept_and_lose)
    engine = make_engine(num_draft_tokens=1, proposer=OtherLetter(60, expected.token_ids, letters))
    answer = run(engine, constrained("slow", 60))["slow"]

    assert len(lost) >= 2 and not any(lost)
    assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, FinishReason.STOP)


def test_a_parser_that_is_lost_behind_a_right_draft_ends_the_answer_there(monkeypatch, make_engine, constrained, run):
    expected = run(make_engine(), constrained("slow", 60))["slow"]
    accept = Matcher.accept

    def accept_and_lose(matcher: Matcher, token_id: int) -> None:
        accept(matcher, token_id)
        if any(frame.function == "_follow" for frame in inspect.stack(0)):
            matcher._state.parser.consume_token(0)

    monkeypatch.setattr(Matcher, "accept", accept_and_lose)
    proposer = WrongAtProposer(60, expected.token_ids, wrong_at=None)
    answer = run(make_engine(num_draft_tokens=2, proposer=proposer), constrained("slow", 60))["slow"]

    assert isinstance(answer.chunks[-1].error, InvalidRequestError)
    assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
