"""What falls out of the pools comes back from the second tier with the same bits, or is computed again."""

import pytest
import torch

TIERS = {
    "memory": {"host_memory_bytes": 10**9},
    "disk": {"host_disk_bytes": 10**9},
}


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, 500, (count,), generator=generator).tolist()


@pytest.fixture
def ask(make_request, run):
    """ask(engine, prompt, **sampling): run one request alone."""
    names = iter(range(10_000))

    def run_one(engine, prompt, **sampling):
        sampling = {"prompt_logprobs": None, "logprobs": 5, "max_tokens": 3} | sampling
        name = f"q{next(names)}"
        return run(engine, make_request(name, prompt, **sampling))[name]

    return run_one


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("length", [300, 520])
def test_an_evicted_prompt_comes_back_with_the_same_bits(tier, length, make_engine, ask, tmp_path):
    engine = make_engine(num_pages=3, max_num_seqs=2, host_disk_dir=str(tmp_path), **TIERS[tier])
    prompt = random_tokens(length, 1)
    cold = ask(engine, prompt)
    ask(engine, random_tokens(700, 2))  # needs every page

    warm = ask(engine, prompt)

    stats = engine.stats().prefix_cache
    assert warm.chunks[0].num_cached_tokens == (length - 1) // 128 * 128
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert (stats.total_host_hits, stats.total_disk_hits) == {"memory": (1, 0), "disk": (0, 1)}[tier]
    assert 0 < stats.total_bytes_restored <= stats.total_bytes_stored


def test_what_came_back_unchanged_is_not_stored_again(make_engine, ask):
    engine = make_engine(num_pages=3, max_num_seqs=2, host_memory_bytes=10**9)
    one, other = random_tokens(520, 1), random_tokens(700, 2)
    for prompt in (one, other, one):
        ask(engine, prompt)
    stored = engine.stats().prefix_cache.total_bytes_stored

    for prompt in (other, one, other):
        assert ask(engine, prompt).chunks[0].num_cached_tokens > 500

    stats = engine.stats().prefix_cache
    assert stats.total_bytes_stored == stored
    assert stats.total_host_hits == 4


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_file_is_computed_again(damage, make_engine, ask, tmp_path):
    engine = make_engine(num_pages=3, max_num_seqs=2, host_disk_bytes=10**9, host_disk_dir=str(tmp_path))
    prompt = random_tokens(520, 1)
    cold = ask(engine, prompt)
    ask(engine, random_tokens(700, 2))
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        path.unlink()
        if damage != "delete":
            path.write_bytes(data[:-7] if damage == "truncate" else bytes([data[0] ^ 64]) + data[1:])

    again = ask(engine, prompt)

    assert again.chunks[0].num_cached_tokens == 0
    assert (again.token_ids, again.logprobs) == (cold.token_ids, cold.logprobs)
    assert engine.stats().prefix_cache.total_tier_failures > 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_preempted_sequence_goes_on_where_it_was_stopped(
    tier, make_engine, make_request, run, assert_same, monkeypatch, tmp_path
):
    engine = make_engine(num_pages=4, max_num_seqs=2, prefix_cache=False, host_disk_dir=str(tmp_path), **TIERS[tier])
    requests = [make_request(f"r{n}", n, prompt_logprobs=None, max_tokens=40) for n in (500, 490)]
    computed: list[int] = []
    forward = engine._runner.forward
    monkeypatch.setattr(engine._runner, "forward", lambda b: computed.append(len(b.input_ids)) or forward(b))

    crowded = run(engine, *requests)

    assert engine.stats().num_preemptions > 0
    assert sum(computed) == 500 + 490 + 2 * 39  # no token twice
    for request in requests:
        name = request.request_id
        assert_same(crowded[name], run(make_engine(), request)[name])
    assert engine.stats().prefix_cache.host_bytes == engine.stats().prefix_cache.disk_bytes == 0


def test_a_tier_that_is_too_small_changes_nothing_but_the_counters(make_engine, ask):
    engine = make_engine(num_pages=3, max_num_seqs=2, host_memory_bytes=1000)
    prompt = random_tokens(520, 1)
    cold = ask(engine, prompt)
    ask(engine, random_tokens(700, 2))

    again = ask(engine, prompt)

    assert again.chunks[0].num_cached_tokens == 0
    assert (again.token_ids, again.logprobs) == (cold.token_ids, cold.logprobs)
