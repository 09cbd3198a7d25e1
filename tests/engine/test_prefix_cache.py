"""The prefix cache is exact: a warm answer equals a cold one, and every hit is told and accounted for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.protocol.stats import PrefixCacheStats


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, 500, (count,), generator=generator).tolist()


@pytest.fixture
def ask(make_request, run):
    """ask(engine, prompt, **sampling): run one request alone; no prompt log-probabilities, they need every row."""
    names = iter(range(10_000))

    def run_one(engine: EngineCore, prompt, **sampling):
        sampling = {"prompt_logprobs": None, "logprobs": 5, "max_tokens": 4} | sampling
        name = f"q{next(names)}"
        return run(engine, make_request(name, prompt, **sampling))[name]

    return run_one


@pytest.fixture
def computed_tokens(monkeypatch):
    """computed_tokens(engine): a list that grows by the number of tokens of every forward pass."""

    def spy(engine: EngineCore) -> list[int]:
        counts: list[int] = []
        forward = engine._runner.forward
        monkeypatch.setattr(
            engine._runner, "forward", lambda batch: counts.append(len(batch.input_ids)) or forward(batch)
        )
        return counts

    return spy


@pytest.mark.parametrize("length", [129, 255, 256, 257, 300, 385, 513, 700])
def test_a_prompt_sent_again_gives_the_same_bits_from_its_last_boundary(length, make_engine, ask):
    engine = make_engine()

    cold, warm = ask(engine, length), ask(engine, length)

    assert [answer.chunks[0].num_cached_tokens for answer in (cold, warm)] == [0, (length - 1) // 128 * 128]
    assert warm.token_ids == cold.token_ids
    assert warm.logprobs == cold.logprobs  # bitwise: both computed the tokens behind the boundary in one chunk


@pytest.mark.parametrize("num_shared", [128, 256, 384, 512])
def test_a_shared_beginning_gives_the_same_bits_as_a_cold_run(num_shared, make_engine, ask):
    shared = random_tokens(num_shared, 1)
    engine = make_engine()
    ask(engine, [*shared, *random_tokens(60, 2)])
    ask(engine, random_tokens(500, 3))  # unrelated traffic

    warm = ask(engine, [*shared, *random_tokens(90, 4)])
    cold = ask(make_engine(), [*shared, *random_tokens(90, 4)])

    assert warm.chunks[0].num_cached_tokens == num_shared
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_a_boundary_where_prompts_part_serves_the_third(make_engine, ask, assert_same):
    shared = random_tokens(300, 1)
    prompts = [[*shared, *random_tokens(200, seed)] for seed in (2, 3, 4)]
    engine = make_engine()

    answers = [ask(engine, prompt) for prompt in prompts]

    assert [answer.chunks[0].num_cached_tokens for answer in answers] == [0, 0, 256]
    assert_same(answers[2], ask(make_engine(), prompts[2]))


def test_the_next_turn_resumes_within_the_last_answer(make_engine, ask, assert_same):
    first = random_tokens(200, 1)
    engine = make_engine()
    answer = ask(engine, first, max_tokens=210)  # 409 tokens are computed, the last one is not

    prompt = [*first, *answer.token_ids, *random_tokens(30, 2)]
    warm = ask(engine, prompt)

    assert warm.chunks[0].num_cached_tokens == 384
    assert_same(warm, ask(make_engine(), prompt))


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_boundary_within_an_answer_stays_when_another_prompt_ends_there(comes, make_engine, make_request, run, ask):
    """The answer goes on past the boundary 128; the other conversation's next turn still resumes there."""
    engine = make_engine()
    long = make_request("long", 100, prompt_logprobs=None, max_tokens=180)
    text = [*long.prompt_token_ids, *run(make_engine(), long)["long"].token_ids]
    engine.add(long)
    while engine.stats().prefix_cache.num_snapshots == 0 and comes == "after":
        engine.step()

    answers = run(engine, make_request("other", text[:140], prompt_logprobs=None, max_tokens=4))

    assert answers["other"].chunks[0].num_cached_tokens == {"before": 0, "after": 128}[comes]
    next_turn = ask(engine, [*text[:140], *answers["other"].token_ids, *random_tokens(20, 1)])
    assert next_turn.chunks[0].num_cached_tokens == 128


@pytest.mark.parametrize("num_other", [60, 150, 180])
def test_equal_answers_keep_the_last_boundary_of_each(num_other, make_engine, make_request, run, ask):
    requests = [
        make_request(name, 100, prompt_logprobs=None, max_tokens=n) for name, n in {"a": 180, "b": num_other}.items()
    ]
    engine = make_engine()

    answers = run(engine, *requests)

    ends = {(100 + len(answer.token_ids) - 1) // 128 * 128 for answer in answers.values()}
    assert engine.stats().prefix_cache.num_snapshots == len(ends)
    for request in requests:
        tokens = [*request.prompt_token_ids, *answers[request.request_id].token_ids]
        warm = ask(engine, [*tokens, *random_tokens(9, 3)], max_tokens=1)
        assert warm.chunks[0].num_cached_tokens == (len(tokens) - 1) // 128 * 128


def test_an_answer_that_continues_does_not_disturb_who_resumed_from_its_half_filled_page(
    make_engine, make_request, run, assert_same
):
    prompt = random_tokens(230, 1)
    requests = {
        name: make_request(name, [*prompt[:128], *tail], prompt_logprobs=None, max_tokens=40)
        for name, tail in {"a": prompt[128:], "b": random_tokens(60, 2), "c": random_tokens(20, 3)}.items()
    }

    together = run(make_engine(), *requests.values())

    assert [together[name].chunks[0].num_cached_tokens for name in "abc"] == [0, 128, 128]
    for name, request in requests.items():
        assert_same(together[name], run(make_engine(prefix_cache=False), request)[name])


def test_prompts_that_arrive_together_compute_their_common_beginning_once(
    make_engine, make_request, run, computed_tokens
):
    shared = random_tokens(600, 1)
    requests = [
        make_request(f"r{seed}", [*shared, *random_tokens(100, seed)], prompt_logprobs=None, max_tokens=1)
        for seed in range(2, 6)
    ]
    engine = make_engine(max_num_batched_tokens=256)
    counts = computed_tokens(engine)

    run(engine, *requests)

    assert sum(counts) == 700 + 3 * (700 - 512)
    assert engine.stats().prefix_cache.total_hit_tokens == 3 * 512


def test_a_preempted_sequence_resumes_from_its_own_prefix(make_engine, make_request, run, assert_same, computed_tokens):
    engine = make_engine(num_pages=5, max_num_seqs=2)
    counts = computed_tokens(engine)
    requests = [make_request(f"r{n}", random_tokens(n, n), prompt_logprobs=None, max_tokens=30) for n in (500, 600)]

    crowded = run(engine, *requests)

    assert engine.stats().num_preemptions > 0
    needed = 500 + 600 + 2 * 29
    assert sum(counts) < needed + 128  # not the victim's whole text once more
    for request in requests:
        name = request.request_id
        assert crowded[name].chunks[0].num_cached_tokens == 0
        assert_same(crowded[name], run(make_engine(), request)[name])


def test_prompt_log_probabilities_are_computed_not_skipped(make_engine, make_request, run, assert_same):
    engine = make_engine()
    run(engine, make_request("first", 300, prompt_logprobs=None))

    answer = run(engine, make_request("again", 300, prompt_logprobs=2))["again"]

    assert answer.chunks[0].num_cached_tokens == 0
    assert_same(answer, run(make_engine(), make_request("x", 300, prompt_logprobs=2))["x"])


@pytest.mark.parametrize("fields", [{"tenant": "other"}, {"cache_salt": "other"}])
def test_tenants_and_salts_share_nothing(fields, make_engine, ask):
    engine = make_engine()
    ask(engine, 300)

    stranger, owner = ask(engine, 300, fields=fields), ask(engine, 300)

    assert stranger.chunks[0].num_cached_tokens == 0
    assert owner.chunks[0].num_cached_tokens == 256


def test_a_decode_engine_serves_the_next_turn_of_what_it_decoded(
    make_engine, make_request, run, ask, step_until_chunk, assert_same
):
    prefill, decode = make_engine(), make_engine()
    request = make_request("x", 250, prompt_logprobs=None, max_tokens=20)
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill).token_ids
    decode.import_sequence(request, first[0], prefill.export_sequence("x").segments)
    answer = run(decode)["x"]

    prompt = [*request.prompt_token_ids, *first, *answer.token_ids, *random_tokens(40, 1)]
    warm = ask(decode, prompt)

    assert warm.chunks[0].num_cached_tokens == 256
    assert_same(warm, ask(make_engine(), prompt))


def test_thoughts_can_be_kept_out_of_the_cache(make_engine, ask):
    first = random_tokens(100, 1)
    hits = {}
    for cache_thinking in (True, False):
        engine = make_engine(cache_thinking=cache_thinking)
        answer = ask(engine, first, max_tokens=60, fields={"thinking": True})
        hits[cache_thinking] = ask(engine, [*first, *answer.token_ids, 20]).chunks[0].num_cached_tokens

    assert hits == {True: 128, False: 0}


def test_a_failed_request_leaves_nothing_to_resume_from(make_engine, ask, toy_model):
    embedding = toy_model.model.embed.weight
    prompt = [*random_tokens(200, 1), 7]
    healthy = embedding[7].clone()
    with torch.no_grad():
        embedding[7] = float("nan")
    engine = make_engine()
    try:
        ask(engine, prompt)
    finally:
        with torch.no_grad():
            embedding[7] = healthy

    assert engine.stats().prefix_cache.num_snapshots == 0
    assert ask(engine, prompt).chunks[0].num_cached_tokens == 0


def test_without_the_cache_nothing_is_kept(make_engine, ask):
    engine = make_engine(prefix_cache=False)

    answers = [ask(engine, 300), ask(engine, 300)]

    assert [answer.chunks[0].num_cached_tokens for answer in answers] == [0, 0]
    assert engine.stats().prefix_cache == PrefixCacheStats()


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_with_drafts_a_resumed_answer_is_that_of_plain_decoding(num_drafts, make_engine, ask):
    first = random_tokens(200, 1)
    engine = make_engine(num_draft_tokens=num_drafts)
    answer = ask(engine, first, max_tokens=80)
    prompt = [*first, *answer.token_ids, *random_tokens(30, 2)]

    warm = ask(engine, prompt, max_tokens=20)

    assert warm.chunks[0].num_cached_tokens == 256  # drafts stepped over the boundary within the answer
    assert sum(chunk.num_drafted for chunk in warm.chunks) > 0
    assert warm.token_ids == ask(make_engine(prefix_cache=False), prompt, max_tokens=20).token_ids


turns = st.tuples(
    st.integers(0, 2),  # conversation
    st.integers(1, 200),  # tokens the user adds
    st.sampled_from([1, 3, 12]),  # tokens of the answer
    st.booleans(),  # the conversation goes back to its beginning
)


@pytest.mark.parametrize("num_examples", [4, pytest.param(120, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_random_conversations_give_the_same_bits_warm_and_cold(num_examples, make_engine, ask):
    """In deterministic mode, because close choices of experts and entries may fall otherwise in other chunks."""

    @settings(max_examples=num_examples, deadline=None, database=None)
    @given(
        st.lists(turns, min_size=3, max_size=4),
        st.sampled_from([64, 300, 2048]),
        st.sampled_from([0, 10**8]),
        st.sampled_from([None, 2]),
    )
    def check(turns, budget, host_memory_bytes, num_snapshots):
        num_pages = 6 if host_memory_bytes else 30
        common = {"max_num_seqs": 2, "max_num_batched_tokens": budget, "is_deterministic": True}
        engine = make_engine(
            num_pages=num_pages, host_memory_bytes=host_memory_bytes, num_snapshots=num_snapshots, **common
        )
        cold_engine = make_engine(num_pages=30, prefix_cache=False, **common)
        beginnings = [random_tokens(150 * (i + 1), 70 + i) for i in range(3)]
        histories = [[*tokens] for tokens in beginnings]
        for i, (conversation, num_user_tokens, max_tokens, starts_over) in enumerate(turns):
            history = [*(beginnings if starts_over else histories)[conversation], *random_tokens(num_user_tokens, i)]
            if len(history) + max_tokens > num_pages * 256:
                continue
            warm = ask(engine, history, max_tokens=max_tokens)
            cold = ask(cold_engine, history, max_tokens=max_tokens)
            assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
            histories[conversation] = [*history, *warm.token_ids]
        assert engine.stats().free_pages == num_pages

    check()
