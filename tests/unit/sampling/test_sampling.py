"""Sampling noise is a pure function of (seed, position); choice follows temperature, top_p and bans."""

import torch

from dsv4_cluster.protocol.request import SamplingParams
from dsv4_cluster.sampling.batch import SamplingBatch, SamplingRow
from dsv4_cluster.sampling.logprobs import top_logprobs
from dsv4_cluster.sampling.sampler import sample_tokens
from dsv4_kernels.sampling.op import gumbel_noise, sample
from dsv4_kernels.sampling.reference import mix64

CPU = torch.device("cpu")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_mix64_matches_integer_arithmetic():
    def mix(x: int) -> int:
        mask = 2**64 - 1
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for value in (0, 1, 2**31, 2**62 + 12345, 2**63 - 1):
        assert mix64(ints(value)).item() % 2**64 == mix(value)
    assert mix64(ints(-1)).item() % 2**64 == mix(2**64 - 1)


def test_noise_depends_only_on_seed_position_and_token_id():
    alone = gumbel_noise(ints(7), ints(100), 1000)
    batch = gumbel_noise(ints(3, 7, 7), ints(100, 100, 101), 2000)

    assert torch.equal(batch[1, :1000], alone[0])
    assert not torch.equal(batch[0, :1000], alone[0])
    assert not torch.equal(batch[2, :1000], alone[0])


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(torch.arange(200), torch.arange(200) * 3, 5000).double().flatten()

    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.57722) < 5e-3
    assert abs(noise.var().item() - 1.64493) < 2e-2


def test_sample_frequencies_follow_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20000, 4).contiguous()

    drawn = sample(logits, torch.full((20000,), 2.0), torch.ones(20000), torch.full((20000,), 5), torch.arange(20000))

    frequency = torch.bincount(drawn, minlength=4) / 20000
    assert torch.allclose(frequency, torch.softmax(logits[0] / 2.0, -1), atol=0.015)


def test_temperature_zero_is_argmax_whatever_the_seed():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))

    drawn = sample(logits, torch.zeros(8), torch.ones(8), torch.arange(8), torch.arange(8))

    assert torch.equal(drawn, logits.argmax(-1))


def test_sampling_is_the_same_alone_and_in_a_batch():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    temperature, top_p = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0]), torch.tensor([1.0, 1.0, 0.9, 0.5, 0.2])
    seeds, positions = ints(1, 2, 3, 4, 5), ints(9, 8, 7, 6, 5)

    together = sample(logits, temperature, top_p, seeds, positions)
    alone = [
        sample(
            logits[i : i + 1], temperature[i : i + 1], top_p[i : i + 1], seeds[i : i + 1], positions[i : i + 1]
        ).item()
        for i in range(5)
    ]

    assert together.tolist() == alone


def test_banned_tokens_are_never_chosen_and_do_not_change_logprobs():
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0, logprobs=3), 4, banned_token_ids=(0,))

    sampled = sample_tokens(logits, SamplingBatch.build([row], CPU))

    assert sampled.token_ids == [1]
    assert abs(sampled.logprobs[0][0] - torch.log_softmax(logits, -1)[0, 0].item()) < 1e-6


def test_top_logprobs_hold_the_chosen_token_first():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 1.0, 2.0]])

    first, second = top_logprobs(logits, ints(0, 2), [2, 0])

    assert list(first) == [0, 1, 2]
    assert list(second) == [2]
    assert abs(sum(torch.tensor(list(first.values())).exp()) - 1) < 1e-6


def test_non_finite_rows_are_reported_and_leave_the_others_alone():
    logits = torch.tensor([[1.0, float("nan"), 0.0], [0.0, 2.0, 1.0], [float("inf"), 0.0, 0.0]])
    rows = [SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 1)] * 3

    sampled = sample_tokens(logits, SamplingBatch.build(rows, CPU))

    assert sampled.is_finite == [False, True, False]
    assert sampled.token_ids[1] == 1
