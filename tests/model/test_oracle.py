"""Log-probabilities equal those of the public transformers implementation in fp32 on the same weights."""

import json
import shutil

import pytest

from dsv4_cluster.weights.reader import Checkpoint
from tests.kit.model_harness import Harness, load_model
from tests.kit.oracle import clear_prompt, load_oracle, oracle_greedy, oracle_logprobs, oracle_run

TOLERANCE = 1e-3  # on log-probabilities down to about -20; measured 5e-5
LENGTHS = [*range(1, 13), *range(126, 131), 255, 256, 257, 600]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prefill_equals_the_oracle(num_tokens, harness, toy_oracle, tokens):
    prompt = tokens(num_tokens, seed=num_tokens)

    delta = (harness.logprobs(prompt) - oracle_logprobs(toy_oracle, prompt)).abs().max()

    assert delta <= TOLERANCE


def test_both_formats_hold_equal_values(harness, checkpoint_dir, tokens):
    plain = Checkpoint.open(checkpoint_dir("toy", "bf16"))
    prompt = tokens(40)

    delta = (Harness(load_model(plain), plain.config).logprobs(prompt) - harness.logprobs(prompt)).abs().max()

    assert delta == 0.0


@pytest.mark.parametrize("num_tokens", [1, 3, 126])
def test_greedy_decoding_follows_the_oracle(num_tokens, harness, toy_oracle, tokens):
    prompt = tokens(num_tokens, seed=100 + num_tokens)
    steps = oracle_greedy(toy_oracle, prompt, 8)
    num_clear = oracle_run(toy_oracle, prompt + [step.token_id for step in steps]).num_clear_rows
    sequence = harness.start(256)

    assert num_clear > num_tokens
    logprobs = harness.step([(sequence, prompt)])[0]
    for step in steps[: num_clear - num_tokens]:
        chosen = int(logprobs[-1].argmax())
        assert chosen == step.token_id or step.gap < 2 * TOLERANCE
        logprobs = harness.step([(sequence, [step.token_id])])[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"swiglu_limit": 0.05, "routed_scaling_factor": 2.5},
        {"sliding_window": 32, "index_topk": 3},
        {"index_topk": 1024, "hc_sinkhorn_iters": 3},
        {"rope_theta": 500.0, "compress_rope_theta": 9000.0},
        {"rope_scaling": None},
        {"rms_norm_eps": 0.01},
        {"hc_eps": 0.01},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_setting_is_read_from_the_config(changes, toy_dir, harness, tmp_path):
    shutil.copytree(toy_dir, tmp_path / "variant")
    path = tmp_path / "variant" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    checkpoint, oracle = Checkpoint.open(path.parent), load_oracle(path.parent)
    prompt = clear_prompt(oracle, 140, vocab_size=checkpoint.config.vocab_size)

    ours = Harness(load_model(checkpoint), checkpoint.config).logprobs(prompt)

    assert (ours - oracle_logprobs(oracle, prompt)).abs().max() <= TOLERANCE
    assert (ours - harness.logprobs(prompt)).abs().max() > TOLERANCE  # the setting matters here
