"""The same tokens give the same log-probabilities however they are cut, batched or placed."""

import pytest
import torch

TOLERANCE = 1e-4  # fp32 on log-probabilities down to about -20; measured 6e-5
BOUNDARIES = [0, 1, 2, 3, 4, 34, 35, 36, 126, 127, 128, 129]  # block ends of 4 and 128, and where top-k starts to bite


def _delta(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("cut", [3, 4, 5, 127, 128, 129])
def test_chunked_prefill_equals_whole_prefill(cut, harness, tokens):
    prompt = tokens(390 if cut > 100 else 200)

    assert _delta(harness.logprobs(prompt, [cut]), harness.logprobs(prompt)) <= TOLERANCE


def test_decoding_one_by_one_equals_prefill(harness, tokens):
    prompt = tokens(140)

    assert _delta(harness.logprobs(prompt, [1]), harness.logprobs(prompt)) <= TOLERANCE


@pytest.mark.parametrize("first", [1, 2, 3, 7, 9, 126, 127, 128, 131, 255, 258])
def test_decoding_after_any_prefill_equals_prefill(first, harness, tokens):
    prompt = tokens(first + 9, seed=first)

    assert _delta(harness.logprobs(prompt, [first, 1]), harness.logprobs(prompt)) <= TOLERANCE


def test_uneven_chunks_equal_whole_prefill(harness, tokens):
    prompt = tokens(600)

    assert _delta(harness.logprobs(prompt, [1, 130, 2, 9, 126, 8, 200, 50]), harness.logprobs(prompt)) <= TOLERANCE


def test_a_mixed_batch_equals_each_sequence_alone(harness, tokens):
    # chunks of step 1 and step 2 per sequence: prefill, continued prefill, decode and short chunks side by side
    sizes = [(130, 1), (3, 128), (9, 2), (1, 1), (200, 57), (127, 1)]
    prompts = [tokens(sum(pair), seed=i) for i, pair in enumerate(sizes)]
    sequences = [harness.start(300) for _ in sizes]

    first = harness.step([(s, p[: n[0]]) for s, p, n in zip(sequences, prompts, sizes, strict=True)])
    second = harness.step([(s, p[n[0] :]) for s, p, n in zip(sequences, prompts, sizes, strict=True)])

    for sequence in sequences:
        harness.finish(sequence)
    for i, prompt in enumerate(prompts):
        assert _delta(torch.cat((first[i], second[i])), harness.logprobs(prompt)) <= TOLERANCE


def test_stale_slots_and_pages_of_finished_sequences_do_not_leak(harness, tokens):
    fresh = harness.logprobs(tokens(140, seed=1))
    for cache in harness.pools.layer_caches:
        for pool in (cache.window, cache.compressed, cache.indexer, cache.state, cache.indexer_state):
            if pool is not None:
                pool.pages.fill_(0xFF)  # NaN everywhere

    assert _delta(harness.logprobs(tokens(140, seed=1)), fresh) == 0.0
    assert _delta(harness.logprobs(tokens(140, seed=1), [126, 1]), fresh) <= TOLERANCE


@pytest.mark.parametrize("position", BOUNDARIES)
def test_later_tokens_do_not_change_earlier_logprobs(position, harness, tokens):
    prompt, other = tokens(140), tokens(140, seed=1)
    edited = prompt[: position + 1] + [(token + 1) % 512 for token in other[position + 1 :]]

    before, after = harness.logprobs(prompt), harness.logprobs(edited)

    assert _delta(before[: position + 1], after[: position + 1]) <= TOLERANCE
    assert _delta(before[position + 1], after[position + 1]) > TOLERANCE


@pytest.mark.parametrize("shift", [1, 4, 100, 1000])
def test_window_attention_depends_on_distances_only(shift, toy, toy_model, harness):
    attention = toy_model.layers[0].attn
    window, num_tokens = toy.config.sliding_window, 160
    x = torch.randn(num_tokens, toy.config.hidden_size, generator=torch.Generator().manual_seed(shift))

    def run(start: int) -> torch.Tensor:
        sequence = harness.start(256 * 6)
        sequence.num_computed = start
        batch = harness.batch([(sequence, [0] * num_tokens)])
        with torch.inference_mode():
            out = attention(x, toy_model.step_index(batch), batch.caches[0])
        harness.finish(sequence)
        return out[window - 1 :]  # rows whose whole window lies in the chunk

    # fp32 angles near position 1000 are off by up to 1000 * 2^-24 rad
    torch.testing.assert_close(run(shift), run(0), atol=1e-3, rtol=1e-3)
