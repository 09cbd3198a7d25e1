"""The offline API: inputs, outputs, stop strings, seeds, errors, and a lazy import that costs a router nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv4_cluster import LLM, SamplingParams
from dsv4_cluster.errors import CheckpointError, ConfigError, InvalidRequestError, PromptTooLongError
from dsv4_cluster.protocol.output import FinishReason

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def llm(toy_dir) -> LLM:
    return LLM(toy_dir, dtype="float32", num_pages=16)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | fields)


def test_one_flat_prompt_a_list_and_an_array_give_the_same(llm):
    flat, nested, array = (
        llm.generate(prompt_token_ids=form, sampling_params=greedy()) for form in (PROMPT, [PROMPT], [np.array(PROMPT)])
    )

    assert len(flat) == len(nested) == len(array) == 1
    assert flat[0].token_ids == nested[0].token_ids == array[0].token_ids
    assert len(flat[0].token_ids) == 12
    assert flat[0].finish_reason is FinishReason.LENGTH


def test_a_text_prompt_is_encoded_with_bos_and_its_text_is_the_decoded_answer(llm):
    output = llm.generate("Hello", greedy())[0]

    assert output.prompt == "Hello"
    assert output.prompt_token_ids == llm.tokenizer.encode_prompt("Hello")
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_results_are_in_the_order_of_the_prompts_whatever_their_length(llm):
    prompts = [PROMPT * 5, PROMPT[:3], PROMPT]
    params = [greedy(max_tokens=n) for n in (3, 20, 9)]

    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)

    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [3, 20, 9]


def test_a_stop_string_cuts_the_text_and_ends_the_answer(llm):
    free = llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(max_tokens=24))[0]
    stop = free.text[6:8]

    output = llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(max_tokens=24, stop=stop))[0]

    assert output.text == free.text[: free.text.index(stop)]
    assert output.finish_reason is FinishReason.STOP
    assert len(output.token_ids) < 24
    assert not llm.engine.has_work()
    assert llm.engine.stats().free_pages == 16


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(llm):
    free = llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy())[0]
    stop = free.token_ids[-1]

    output = llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(stop_token_ids=[stop]))[0]

    assert output.token_ids[-1] == stop
    assert output.text == llm.tokenizer.decode(output.token_ids[:-1])


def test_a_seed_repeats_and_no_seed_varies(llm):
    def sample(seed):
        params = greedy(temperature=1.0, max_tokens=20, seed=seed)
        return llm.generate(prompt_token_ids=PROMPT, sampling_params=params)[0].token_ids

    assert sample(7) == sample(7) != sample(8)
    assert sample(None) != sample(None)


def test_logprobs_are_per_token_and_prompt_logprobs_start_with_none(llm):
    output = llm.generate(prompt_token_ids=PROMPT, sampling_params=greedy(logprobs=2, prompt_logprobs=1))[0]

    assert len(output.logprobs) == len(output.token_ids)
    assert all(token_id in entry for token_id, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert all(token_id in entry for token_id, entry in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True))


@pytest.mark.parametrize(("kv_cache_dtype", "indexer_dtype"), [("fp8", "auto"), ("fp8", "fp8"), ("fp8", "fp4")])
def test_quantised_caches_give_close_but_other_numbers(llm, toy_dir, kv_cache_dtype, indexer_dtype):
    params = greedy(max_tokens=1, prompt_logprobs=0)
    prompt = PROMPT * 4
    exact = llm.generate(prompt_token_ids=prompt, sampling_params=params)[0]

    quantised = LLM(toy_dir, dtype="float32", kv_cache_dtype=kv_cache_dtype, indexer_dtype=indexer_dtype, num_pages=4)
    output = quantised.generate(prompt_token_ids=prompt, sampling_params=params)[0]

    rows = zip(prompt[1:], exact.prompt_logprobs[1:], output.prompt_logprobs[1:], strict=True)
    deltas = [abs(one[token_id] - other[token_id]) for token_id, one, other in rows]
    assert 1e-5 < float(np.mean(deltas)) < 0.5


def test_bfloat16_gives_close_numbers(llm, toy_dir):
    params = greedy(max_tokens=1, prompt_logprobs=0)
    exact = llm.generate(prompt_token_ids=PROMPT, sampling_params=params)[0]

    output = LLM(toy_dir, dtype="bfloat16", num_pages=4).generate(prompt_token_ids=PROMPT, sampling_params=params)[0]

    rows = zip(PROMPT[1:], exact.prompt_logprobs[1:], output.prompt_logprobs[1:], strict=True)
    assert float(np.mean([abs(one[token_id] - other[token_id]) for token_id, one, other in rows])) < 0.5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, InvalidRequestError, "either prompts or prompt_token_ids"),
        ({"prompts": "a", "prompt_token_ids": [1]}, InvalidRequestError, "either"),
        ({"prompt_token_ids": [[1], []]}, InvalidRequestError, "empty"),
        ({"prompt_token_ids": [[5] * 5000]}, PromptTooLongError, "4096"),
        (
            {"prompt_token_ids": [[1], [2]], "sampling_params": [SamplingParams()]},
            InvalidRequestError,
            "1 sampling_params",
        ),
    ],
)
def test_wrong_input_is_refused_and_nothing_stays_behind(llm, arguments, error, message):
    with pytest.raises(error, match=message):
        llm.generate(**arguments)

    assert not llm.engine.has_work()
    llm.engine.check()


def test_drafts_are_counted_and_change_nothing(llm, toy_dir):
    params = greedy(temperature=1.0, seed=3, max_tokens=40)
    plain = llm.generate(prompt_token_ids=PROMPT, sampling_params=params)[0]

    output = LLM(toy_dir, dtype="float32", num_pages=4, num_draft_tokens=2).generate(
        prompt_token_ids=PROMPT, sampling_params=params
    )[0]

    assert output.token_ids == plain.token_ids
    assert 0 < output.num_accepted < output.num_drafted
    assert (plain.num_drafted, plain.num_accepted) == (0, 0)


def test_draft_logprobs_need_no_drafting_and_name_the_likeliest_drafts(llm):
    one, two = llm.draft_logprobs([PROMPT, PROMPT[:5]], top=3), llm.draft_logprobs(PROMPT)

    assert [len(entries) for entries in one] == [19, 4]
    assert all(len(entry) == 3 and list(entry.values()) == sorted(entry.values(), reverse=True) for entry in one[0])
    assert two == [[{next(iter(entry.items()))[0]: next(iter(entry.values()))} for entry in one[0]]]
    assert llm.draft_logprobs([[7]]) == [[]]
    assert not llm.engine.has_work()


def test_draft_logprobs_along_an_answer_tell_what_greedy_drafts_were_right(llm, toy_dir):
    params = greedy(max_tokens=30)
    drafting = LLM(toy_dir, dtype="float32", num_pages=4, num_draft_tokens=1)
    output = drafting.generate(prompt_token_ids=PROMPT, sampling_params=params)[0]

    (entries,) = llm.draft_logprobs([[*PROMPT, *output.token_ids]])

    # Row i drafts token i + 2; the first draft is that of the second answer token, and after a right one comes a gap.
    answer, num_right, position = output.token_ids, 0, 1
    while position < len(answer) - 1:
        is_right = answer[position] in entries[len(PROMPT) + position - 2]
        num_right += is_right
        position += 1 + is_right
    assert output.num_accepted == num_right


def test_speculation_with_a_dspark_drafter_is_refused(toy_dir, tmp_path):
    directory = Path(shutil.copytree(toy_dir, tmp_path / "dspark"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dspark_block_size": 5}))

    with pytest.raises(ConfigError, match="num_draft_tokens is 2, but the checkpoint has a DSpark drafter"):
        LLM(directory, num_draft_tokens=2)
    with pytest.raises(ConfigError, match="no usable MTP layer"):
        LLM(directory, num_pages=4).draft_logprobs(PROMPT)


def test_a_context_limit_beyond_the_cache_is_refused_with_the_pages_needed(toy_dir):
    with pytest.raises(ConfigError, match="num_pages to at least 40"):
        LLM(toy_dir, num_pages=4, max_model_len=10_000)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(tmp_path)


def test_the_package_exports_llm_without_loading_torch():
    code = (
        "import sys, dsv4_cluster\n"
        "assert 'torch' not in sys.modules\n"
        "from dsv4_cluster import LLM, SamplingParams\n"
        "assert 'torch' in sys.modules and 'ray' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
