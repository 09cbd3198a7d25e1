"""The public API against transformers in fp32: same log-probabilities, same greedy answers, every checkpoint form."""

import pytest
import torch

from dsv4_cluster import LLM, SamplingParams
from tests.kit.oracle import OracleRun, load_oracle, oracle_run

TOLERANCE = 1e-3  # |difference of log-probabilities|, both sides fp32
UNDECIDED_GAP = 2e-3  # the oracle's best and second best token closer than this: either may win
NUM_GREEDY = 32
LENGTHS = (*range(1, 13), *range(126, 131), 255, 256, 257, 600)
GREEDY_LENGTHS = (3, 127, 257)
CASES = [
    ("toy", "official"),
    ("toy", "bf16"),
    ("tiny", "official"),
    pytest.param("tiny", "bf16", marks=pytest.mark.slow),
]


class Oracle:
    """The oracle of one preset and what it said; official and bf16 directories hold equal values, so it runs once."""

    def __init__(self, checkpoint_dir, preset: str) -> None:
        self._model = load_oracle(checkpoint_dir(preset, "official"))
        self._runs: dict[tuple[int, ...], OracleRun] = {}

    def run(self, token_ids: list[int]) -> OracleRun:
        key = tuple(token_ids)
        if key not in self._runs:
            self._runs[key] = oracle_run(self._model, token_ids)
        return self._runs[key]

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens for which no expert or entry selection of the oracle is too close to call."""
        generator = torch.Generator().manual_seed(num_tokens)
        for _ in range(20):
            ids = torch.randint(0, self._model.config.vocab_size, (num_tokens,), generator=generator).tolist()
            if self.run(ids).num_clear_rows == num_tokens:
                return ids
        raise AssertionError(f"no clear prompt of {num_tokens} tokens")


@pytest.fixture(scope="module")
def oracles(checkpoint_dir):
    made: dict[str, Oracle] = {}

    def get(preset: str) -> Oracle:
        if preset not in made:
            made[preset] = Oracle(checkpoint_dir, preset)
        return made[preset]

    return get


def check_rows(entries: list[dict[int, float]], expected: torch.Tensor, name: str) -> None:
    for row, entry in enumerate(entries):
        worst = max(abs(logprob - expected[row, token_id].item()) for token_id, logprob in entry.items())
        assert worst <= TOLERANCE, f"{name}, row {row}: {worst}"


@pytest.mark.parametrize(("preset", "fmt"), CASES)
def test_log_probabilities_and_greedy_answers_equal_the_oracle(preset, fmt, oracles, checkpoint_dir):
    oracle = oracles(preset)
    llm = LLM(checkpoint_dir(preset, fmt), dtype="float32")
    prompts = [oracle.prompt(n) for n in LENGTHS]
    params = [
        SamplingParams(
            max_tokens=NUM_GREEDY if n in GREEDY_LENGTHS else 1,
            temperature=0,
            ignore_eos=True,
            prompt_logprobs=8,
            logprobs=8,
        )
        for n in LENGTHS
    ]

    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)

    for prompt, output in zip(prompts, outputs, strict=True):
        expected = oracle.run(prompt).logprobs
        check_rows([*output.prompt_logprobs[1:], output.logprobs[0]], expected, f"prompt of {len(prompt)}")
        if len(prompt) in GREEDY_LENGTHS:
            check_greedy(prompt, output.token_ids, oracle)


def check_greedy(prompt: list[int], token_ids: list[int], oracle: Oracle) -> None:
    """Given our own tokens as prefix, the oracle prefers the same next token; so both greedy answers are equal."""
    run = oracle.run([*prompt, *token_ids[:-1]])
    assert run.num_clear_rows > len(prompt) + 4
    for i, token_id in enumerate(token_ids[: run.num_clear_rows - len(prompt) + 1]):
        best = run.logprobs[len(prompt) - 1 + i].topk(2)
        gap = (best.values[0] - best.values[1]).item()
        assert token_id == best.indices[0] or gap < UNDECIDED_GAP, f"prompt of {len(prompt)}, token {i}: gap {gap}"


@pytest.mark.slow
def test_a_prompt_that_exercises_top_k_selection_equals_the_oracle(oracles, checkpoint_dir):
    """2,600 tokens make 650 entries, more than tiny's index_topk of 512. The oracle needs about 10 GB for it."""
    oracle = oracles("tiny")
    prompt = torch.randint(0, 129280, (2600,), generator=torch.Generator().manual_seed(0)).tolist()
    llm = LLM(checkpoint_dir("tiny", "official"), dtype="float32")

    output = llm.generate(
        prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=8)
    )[0]

    # No row of this prompt lets rounding decide a selection (measured: 2.5e-5 at worst), so every row is compared.
    check_rows(output.prompt_logprobs[1:], oracle.run(prompt).logprobs, "prompt of 2600")
