"""The identities that make the engine exact: chunked = whole, batched = alone, preempted = not, split = local."""

import pytest

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 530)


@pytest.fixture(scope="module")
def whole_answers():
    """Answers of prompts computed whole and alone, by (length, sampling key); filled on first use."""
    return {}


def alone(cache, make_engine, make_request, run, length, **sampling):
    key = (length, tuple(sorted(sampling.items())))
    if key not in cache:
        cache[key] = run(make_engine(), make_request("x", length, **sampling))["x"]
    return cache[key]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 127, 128, 129])
def test_chunked_prefill_equals_whole(cut, make_engine, make_request, run, assert_same, whole_answers):
    length = 300 if cut > 1 else 140

    chunked = run(make_engine(max_num_batched_tokens=cut), make_request("x", length))["x"]

    assert_same(chunked, alone(whole_answers, make_engine, make_request, run, length))


def test_a_mixed_batch_equals_each_alone(make_engine, make_request, run, assert_same, whole_answers):
    requests = [make_request(f"n{n}", n) for n in LENGTHS]

    together = run(make_engine(max_num_seqs=16, max_num_batched_tokens=200), *requests)

    for n in LENGTHS:
        assert_same(together[f"n{n}"], alone(whole_answers, make_engine, make_request, run, n))


def test_decode_one_by_one_equals_prefill(make_engine, make_request, run, assert_same):
    request = make_request("decode", 120, max_tokens=140, logprobs=0)
    decoded = run(make_engine(), request)["decode"]

    prompt = [*request.prompt_token_ids, *decoded.token_ids]
    prefilled = run(make_engine(), make_request("prefill", prompt, max_tokens=1))["prefill"]

    for i, entry in enumerate(decoded.logprobs):
        token_id = decoded.token_ids[i]
        assert abs(entry[token_id] - prefilled.prompt_logprobs[120 + i][token_id]) <= 1e-4


def test_preempted_sequences_end_as_if_undisturbed(make_engine, make_request, run, assert_same):
    engine = make_engine(num_pages=4, max_num_seqs=3)
    requests = [make_request(f"r{n}", n, max_tokens=40) for n in (220, 230, 240)]

    crowded = run(engine, *requests)

    assert engine.stats().num_preemptions > 0
    for n in (220, 230, 240):
        assert_same(crowded[f"r{n}"], run(make_engine(), make_request("x", n, max_tokens=40))["x"])


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(make_engine, make_request, run):
    sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 12}
    requests = [make_request(f"s{seed}", 50, seed=seed, **sampling) for seed in range(4)]

    together = run(make_engine(), *requests)

    assert len({tuple(answer.token_ids) for answer in together.values()}) > 1
    for seed in range(4):
        single = run(make_engine(), make_request("x", 50, seed=seed, **sampling))["x"]
        assert together[f"s{seed}"].token_ids == single.token_ids


@pytest.mark.parametrize("length", [1, 2, 3, 4, 127, 128, 129, 255, 256, 259])
def test_export_and_import_equal_local(
    length, make_engine, make_request, run, step_until_chunk, assert_same, whole_answers
):
    prefill, decode = make_engine(num_pages=4), make_engine(num_pages=9, max_num_seqs=3)
    decode.add(make_request("neighbour", 40, max_tokens=30))
    decode.step()
    request = make_request("x", length)
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill)

    export = prefill.export_sequence("x")
    assert prefill.abort("x")
    assert decode.import_sequence(request, first.token_ids[0], export.segments)
    answer = run(decode)["x"]

    expected = alone(whole_answers, make_engine, make_request, run, length)
    assert [*first.token_ids, *answer.token_ids] == expected.token_ids
    for one, other in zip(answer.logprobs, expected.logprobs[1:], strict=True):
        assert max(abs(one[t] - other[t]) for t in one.keys() & other.keys()) <= 1e-4
    assert prefill.stats().free_pages == 4
    assert answer.chunks[0].num_cached_tokens == length


def test_an_imported_sequence_that_is_preempted_ends_as_if_undisturbed(
    make_engine, make_request, run, step_until_chunk
):
    prefill, decode = make_engine(), make_engine(num_pages=3, max_num_seqs=3)
    decode.add(make_request("old", 250, max_tokens=60))
    decode.step()
    request = make_request("x", 250, max_tokens=20)
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill)

    assert decode.import_sequence(request, first.token_ids[0], prefill.export_sequence("x").segments)
    answer = run(decode)["x"]

    assert decode.stats().num_preemptions > 0
    expected = run(make_engine(), request)["x"]
    assert [*first.token_ids, *answer.token_ids] == expected.token_ids
