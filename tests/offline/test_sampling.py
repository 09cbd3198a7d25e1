"""Sampling options and several answers per prompt through the offline API and the command line."""

import dataclasses
import json
import math

import pytest
from typer.testing import CliRunner

from dsv4_cluster import LLM, SamplingParams
from dsv4_cluster.cli.main import app
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.copies import copies, copy_seed
from dsv4_cluster.protocol.output import FinishReason

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def llm(toy_dir) -> LLM:
    return LLM(toy_dir, dtype="float32", num_pages=16)


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "seed": 3, "ignore_eos": True} | fields)


def generate(llm, params, prompt=PROMPT):
    return llm.generate(prompt_token_ids=prompt, sampling_params=params)[0]


@pytest.mark.parametrize("length", [20, 300])
def test_n_answers_are_distinct_reproducible_and_begin_with_the_single_one(llm, length):
    prompt = (PROMPT * 20)[:length]

    one, three, again = (generate(llm, sampled(n=n, logprobs=1), prompt) for n in (1, 3, 3))

    answers = [output.token_ids for output in three.outputs]
    assert [output.index for output in three.outputs] == [0, 1, 2]
    assert len(set(map(tuple, answers))) == 3
    assert answers == [output.token_ids for output in again.outputs]
    assert one.token_ids == one.outputs[0].token_ids == answers[0]
    assert [three.token_ids, three.text, three.finish_reason] == [
        answers[0],
        three.outputs[0].text,
        FinishReason.LENGTH,
    ]
    assert math.isclose(
        three.outputs[1].cumulative_logprob,
        sum(entry[t] for entry, t in zip(three.outputs[1].logprobs, answers[1], strict=True)),
    )


def test_a_copy_is_the_answer_to_its_own_seed(llm):
    answers = generate(llm, sampled(n=2)).outputs

    assert generate(llm, sampled(seed=copy_seed(3, 1))).token_ids == answers[1].token_ids


def test_copies_resume_the_prompt_that_the_first_one_computed(llm):
    prompt = [*range(100, 400), 7]
    before = llm.engine.stats().prefix_cache

    output = generate(llm, sampled(n=3, prompt_logprobs=1), prompt)

    after = llm.engine.stats().prefix_cache
    assert after.total_hit_tokens - before.total_hit_tokens == 2 * 256  # all whole blocks of 128, by both copies
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == len(prompt)


def test_greedy_copies_are_equal(llm):
    first, second = generate(llm, sampled(n=2, temperature=0.0)).outputs

    assert first.token_ids == second.token_ids


def test_answers_of_several_prompts_stay_with_their_prompt(llm):
    prompts, params = [PROMPT, PROMPT[:5], PROMPT * 8], [sampled(n=2), sampled(n=1), sampled(n=3, max_tokens=4)]

    together = llm.generate(prompt_token_ids=prompts, sampling_params=params)

    for prompt, param, output in zip(prompts, params, together, strict=True):
        alone = generate(llm, param, prompt)
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in alone.outputs]
    llm.engine.check()


def test_a_stop_string_in_the_first_answer_leaves_the_copies_running(llm):
    prompt = PROMPT * 10
    free = generate(llm, sampled(max_tokens=1), prompt)

    output = generate(llm, sampled(n=2, stop=free.text), prompt)

    assert output.text == ""
    assert output.finish_reason is FinishReason.STOP
    assert output.outputs[1].finish_reason is not None
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0, expected 1..128"),
        ({"n": 129}, "n is 129"),
        ({"top_k": -2}, "top_k is -2"),
        ({"stop": ""}, "stop holds an empty string"),
        ({"stop": ["end", ""]}, "stop holds an empty string"),
    ],
)
def test_a_wrong_value_is_refused_and_nothing_stays_behind(llm, fields, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompt_token_ids=[PROMPT, PROMPT], sampling_params=[sampled(), sampled(**fields)])

    assert not llm.engine.has_work()
    llm.engine.check()


def test_options_reach_the_engine(llm):
    greedy = generate(llm, sampled(temperature=0.0)).token_ids

    assert generate(llm, sampled(top_k=1)).token_ids == greedy
    assert generate(llm, sampled(min_p=1.0)).token_ids == greedy
    assert generate(llm, sampled(top_k=-1)).token_ids == generate(llm, sampled()).token_ids
    assert generate(llm, sampled(logit_bias={77: 100})).token_ids == [77] * 10
    repeated = generate(llm, sampled(logit_bias={77: 20.0}, frequency_penalty=2.0, presence_penalty=2.0)).token_ids
    assert 1 <= repeated.count(77) < 10


def test_a_thinking_budget_forces_the_end_of_thoughts(llm):
    end = llm.tokenizer.decode(generate(llm, sampled(thinking_budget=4)).token_ids[4:5])

    assert end == "</think>"


def test_copies_differ_in_id_and_seed_and_leave_prompt_logprobs_to_the_first():
    request = sampled(n=4, prompt_logprobs=2).to_requests("req", PROMPT)

    assert len({copy.request_id for copy in request}) == len({copy.sampling.seed for copy in request}) == 4
    assert request[0].request_id == "req" and request[0].sampling.seed == 3
    assert [copy.sampling.prompt_logprobs for copy in request] == [2, None, None, None]
    for copy in copies(request[0], 4):
        same = dataclasses.replace(copy.sampling, seed=3, prompt_logprobs=request[0].sampling.prompt_logprobs)
        assert dataclasses.replace(copy, request_id="req", sampling=same) == request[0]


def test_copy_seeds_stay_in_range_and_apart_from_neighbouring_seeds():
    seeds = {copy_seed(seed, index) for seed in (0, 1, 2, 2**63 - 1) for index in range(64)}

    assert len(seeds) == 4 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_command_line_takes_every_option(llm, toy_dir):
    options = (
        "--prompt Hello --max-tokens 6 --seed 5 --top-k 40 --min-p 0.01 --presence-penalty 0.5 --frequency-penalty 0.5 "
        "--repetition-penalty 1.1 --logit-bias 70=3 --logit-bias 71=-100 --n 2 --stop-token-id 90 --min-tokens 2 "
        "--thinking-budget 3 --dtype float32 --json"
    )

    result = CliRunner().invoke(app, ["generate", str(toy_dir), *options.split()])

    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    params = SamplingParams(
        max_tokens=6,
        seed=5,
        top_k=40,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={70: 3, 71: -100},
        n=2,
        stop_token_ids=[90],
        min_tokens=2,
        thinking_budget=3,
    )
    expected = llm.generate("Hello", params)[0]
    assert [answer["token_ids"] for answer in shown["outputs"]] == [answer.token_ids for answer in expected.outputs]


def test_a_malformed_bias_on_the_command_line_is_quoted(toy_dir):
    result = CliRunner().invoke(app, ["generate", str(toy_dir), "--prompt", "a", "--logit-bias", "5"])

    assert result.exit_code == 2
    assert "'5' is not of the form ID=BIAS" in result.output
