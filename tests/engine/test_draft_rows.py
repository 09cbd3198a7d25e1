"""The MTP layer's cache rows are those of a teacher-forced run, however the sequence came to be where it is."""

import pytest
import torch

from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.engine.draft_scores import DraftScorer
from tests.kit.proposers import WrongAtProposer

TOLERANCE = 1e-4  # fp32 bound of the identities: chunks of other sizes sum in another order


@pytest.fixture
def mtp_rows():
    """mtp_rows(engine, request_id, num_tokens): (window rows of the last 64 true positions, last hidden) of a slot."""

    def read(engine, request_id: str, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = engine.loaded.pools.layer_caches[-1]
        slot = engine._kv.slot(request_id)

        def gather(rows, positions):
            return rows.gather(slot * rows.rows_per_page + torch.tensor(positions) % rows.rows_per_page)

        positions = list(range(max(0, num_tokens - 64), num_tokens - 1))
        return gather(cache.window, positions), gather(cache.hidden, [num_tokens - 1])

    return read


@pytest.fixture
def assert_warm(make_engine, make_request, mtp_rows):
    """assert_warm(engine, request_id, token_ids): the rows equal those of the same tokens as one prompt."""

    def check(engine, request_id: str, token_ids: list[int]) -> None:
        cold = make_engine(num_draft_tokens=1, prefix_cache=False)
        cold.add(make_request("cold", token_ids), hold_after_prefill=True)
        while cold.has_work():
            cold.step()

        ours, theirs = (mtp_rows(each, name, len(token_ids)) for each, name in ((engine, request_id), (cold, "cold")))

        for mine, expected in zip(ours, theirs, strict=True):
            assert (mine - expected).abs().max() <= TOLERANCE * expected.abs().max()

    return check


def prefilled(engine, request) -> int:
    """Compute a prompt and hold it. Returns: its first token."""
    engine.add(request, hold_after_prefill=True)
    while engine.has_work():
        chunks = engine.step().chunks
    return chunks[0].token_ids[0]


@pytest.mark.parametrize("cut", [1, 3, 127, 128, 200])
def test_a_chunked_prompt_leaves_the_drafter_as_a_whole_one(cut, make_engine, make_request, assert_warm):
    request = make_request("x", 150 if cut == 1 else 300)
    engine = make_engine(num_draft_tokens=1, max_num_batched_tokens=cut, prefix_cache=False)

    prefilled(engine, request)

    assert_warm(engine, "x", list(request.prompt_token_ids))


@pytest.mark.parametrize("wrong_at", [0, 2, None])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_rows_made_by_drafts_are_replaced_by_true_ones(
    num_draft_tokens, wrong_at, make_engine, make_request, run, assert_warm
):
    request = make_request("x", 120, max_tokens=30)
    answer = run(make_engine(), request)["x"].token_ids
    engine = make_engine(num_draft_tokens=num_draft_tokens, proposer=WrongAtProposer(120, answer, wrong_at))
    engine.add(request)
    tokens = []

    while len(tokens) < 20:
        tokens += engine.step().chunks[0].token_ids

    assert_warm(engine, "x", [*request.prompt_token_ids, *tokens[:-1]])


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_the_mtp_layer_drafts_the_same_after_an_import(num_draft_tokens, make_engine, make_request, run):
    request = make_request("x", 131, max_tokens=24, temperature=1.0, seed=4)
    local = run(make_engine(num_draft_tokens=num_draft_tokens), request)["x"]
    prefill = make_engine(num_draft_tokens=num_draft_tokens)
    decode = make_engine(num_draft_tokens=num_draft_tokens, num_pages=9)

    first = prefilled(prefill, request)
    assert decode.import_sequence(request, first, prefill.export_sequence("x").segments)
    answer = run(decode)["x"]

    assert [first, *answer.token_ids] == local.token_ids
    assert prefill.stats().total_drafted_tokens == 0
    counts = [(chunk.num_drafted, chunk.num_accepted) for chunk in answer.chunks]
    assert counts == [(chunk.num_drafted, chunk.num_accepted) for chunk in local.chunks[1:]]
    assert counts[0][0] == num_draft_tokens  # it drafts in its first step


def test_an_engine_without_the_mtp_layer_has_another_layout(make_engine, make_request):
    drafting, plain = make_engine(num_draft_tokens=1), make_engine()

    assert drafting.layout_id != plain.layout_id
    assert any(shape.pool == "last_hidden" for shape in drafting.live_segment_shapes(5))
    assert not any(shape.pool == "last_hidden" for shape in plain.live_segment_shapes(5))


def test_a_sequence_resumed_from_the_prefix_cache_drafts_as_a_cold_one(make_engine, make_request, run):
    request = make_request("x", 300, max_tokens=24, temperature=1.0, seed=4, prompt_logprobs=None)
    cold = run(make_engine(num_draft_tokens=2, prefix_cache=False), request)["x"]
    engine = make_engine(num_draft_tokens=2)
    run(engine, request)

    warm = run(engine, request)["x"]

    assert warm.chunks[0].num_cached_tokens == 256
    assert warm.token_ids == cold.token_ids
    drafts = [[(c.num_drafted, c.num_accepted) for c in answer.chunks] for answer in (warm, cold)]
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("wrong_at", [0, 3, None])
def test_the_next_turn_resumes_from_an_answer_that_was_drafted(wrong_at, make_engine, make_request, run):
    request = make_request("x", 120, max_tokens=20, prompt_logprobs=None)
    answer = run(make_engine(), request)["x"].token_ids
    turn = [*request.prompt_token_ids, *answer, *range(20, 40)]
    expected = run(make_engine(), make_request("next", turn, prompt_logprobs=None))["next"]
    engine = make_engine(num_draft_tokens=4, proposer=WrongAtProposer(120, answer, wrong_at))
    assert run(engine, request)["x"].token_ids == answer

    warm = run(engine, make_request("next", turn, max_tokens=1, prompt_logprobs=None))["next"]

    assert warm.chunks[0].num_cached_tokens == 128
    assert warm.token_ids == expected.token_ids[:1]
    for token_id, logprob in warm.logprobs[0].items():
        assert abs(logprob - expected.logprobs[0][token_id]) <= 1e-4


@pytest.mark.parametrize("chunk_tokens", [1000, 64, 1])
def test_draft_scores_are_what_a_greedy_drafter_drafts(chunk_tokens, toy_model_mtp, make_engine, make_request, run):
    prompt = list(make_request("x", 40).prompt_token_ids)
    scorer = DraftScorer(toy_model_mtp, toy_model_mtp.mtp, KVConfig(), chunk_tokens=chunk_tokens)

    entries = scorer.score(prompt, 2)

    assert len(entries) == 39 and all(len(entry) == 2 for entry in entries)
    engine = make_engine(num_draft_tokens=1)
    engine.add(make_request("x", prompt[:20]))
    first = engine.step().chunks[0].token_ids[0]
    drafts = []
    engine._drafting._proposer = _Recorder(engine._drafting._proposer, drafts)
    engine.step()
    entry = scorer.score([*prompt[:20], first], 1)[-1]
    assert drafts == [[next(iter(entry))]]


class _Recorder:
    """Lets a proposer work and remembers its drafts."""

    def __init__(self, proposer, drafts: list) -> None:
        self._inner, self._drafts = proposer, drafts

    def propose(self, rows):
        self._drafts += self._inner.propose(rows)
        return [list(drafts) for drafts in self._drafts[-len(rows) :]]
