"""Deterministic mode: tokens and log-probabilities are the same bits however a request is batched, cut or moved.

bfloat16 takes the C kernels where they run, float32 always the torch ones, a row per pass; that is slow, so its prompts
are short.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.engine.determinism import needs_single_rows
from dsv4_cluster.engine.loader import LoadedModel, load_model
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.parallel.state import ParallelState

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A loaded model and prompts that fit its speed; the last length is the longest."""

    loaded: LoadedModel
    kv: dict
    lengths: tuple[int, ...]
    cuts: tuple[int, ...]
    num_tokens: int


def load(toy_dir, dtype: str, num_draft_tokens: int = 0, **kv) -> Case:
    engine = EngineConfig(dtype=dtype, deterministic=True)
    speculation = SpeculationConfig(num_draft_tokens=num_draft_tokens)
    loaded = load_model(toy_dir, engine, KVConfig(num_pages=1, **kv), speculation, ParallelState())
    if loaded.is_row_by_row:
        return Case(loaded, kv, (3, 40, 130), (5,), 4)
    return Case(loaded, kv, (1, 3, 5, 40, 127, 128, 130, 300), (1, 3, 4, 5, 127, 128, 129), 12)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def case(request, toy_dir) -> Case:
    return load(toy_dir, request.param)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def compressed_case(request, toy_dir) -> Case:
    loaded = load(toy_dir, request.param, kv_cache_dtype="fp8", indexer_dtype="fp4")
    return replace(loaded, lengths=(5, 130), cuts=(7,))


def start(
    case: Case, max_num_batched_tokens: int = 2048, num_pages: int = 32, num_draft_tokens: int = 0, **kv
) -> EngineCore:
    pools = KVPools.allocate(case.loaded.layout, num_pages, 8, CPU)
    engine = EngineConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, deterministic=True)
    return EngineCore(
        replace(case.loaded, pools=pools, max_model_len=num_pages * 256),
        engine,
        KVConfig(num_pages=num_pages, **case.kv, **kv),
        SpeculationConfig(num_draft_tokens=num_draft_tokens),
    )


@pytest.fixture
def ask(make_request):
    def request(case: Case, length: int, name: str | None = None, **fields):
        fields = {"max_tokens": case.num_tokens, "logprobs": 5, "prompt_logprobs": 3} | fields
        return make_request(name or f"r{length}", length, **fields)

    return request


def said(answer):
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs


@pytest.fixture
def alone(ask, run):
    def compute(case: Case, length: int, **fields):
        return said(run(start(case), ask(case, length, "alone", **fields))["alone"])

    return compute


def check_batches_and_chunks(case, ask, run, alone):
    together = run(start(case), *(ask(case, length) for length in case.lengths))
    for length in case.lengths:
        assert said(together[f"r{length}"]) == alone(case, length), length
    longest = case.lengths[-1]
    for cut in case.cuts:
        assert said(run(start(case, cut), ask(case, longest))[f"r{longest}"]) == said(together[f"r{longest}"]), cut


def test_batches_and_chunks_give_the_same_bits_as_a_request_alone(case, ask, run, alone):
    check_batches_and_chunks(case, ask, run, alone)


def test_so_they_do_with_fp8_rows_and_fp4_index_keys(compressed_case, ask, run, alone):
    check_batches_and_chunks(compressed_case, ask, run, alone)


def test_machines_without_the_c_kernels_give_the_same_bits_in_bf16(toy_dir, ask, run, alone, without_native):
    case = replace(load(toy_dir, "bfloat16"), lengths=(5, 45), cuts=(7,))

    assert case.loaded.is_row_by_row
    check_batches_and_chunks(case, ask, run, alone)


def test_export_and_import_give_the_same_bits_as_local(case, ask, run, alone, step_until_chunk):
    for length in (3, case.lengths[-1]):
        request = ask(case, length)
        prefill, decode = start(case), start(case)
        prefill.add(request, hold_after_prefill=True)
        first = step_until_chunk(prefill)
        exported = prefill.export_sequence(request.request_id)

        assert decode.import_sequence(request, first.token_ids[0], exported.segments)
        rest = run(decode)[request.request_id]

        tokens, logprobs, _ = alone(case, length)
        assert [*first.token_ids, *rest.token_ids] == tokens
        assert [*first.logprobs, *rest.logprobs] == logprobs


def test_a_prefix_computed_for_another_prompt_gives_the_same_bits_as_cold(case, ask, make_request, run):
    length = case.lengths[-1] + 10
    fields = {"max_tokens": case.num_tokens, "logprobs": 5, "prompt_logprobs": None}
    prompt = list(ask(case, length).prompt_token_ids)
    cold = run(start(case), make_request("cold", prompt, **fields))["cold"]
    engine = start(case, max_num_batched_tokens=96)
    run(engine, make_request("other", [*prompt[:-5], *range(20, 40)], **fields))

    warm = run(engine, make_request("warm", prompt, **fields))["warm"]

    assert warm.chunks[0].num_cached_tokens >= 128
    assert said(warm) == said(cold)


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def long_case(request, toy_dir) -> Case:
    """Preemption takes more than a page per request: about 1,000 rows."""
    return load(toy_dir, request.param)


@pytest.mark.parametrize("spill", [{}, {"host_memory_bytes": 10**9}], ids=["recompute", "spill"])
def test_a_preempted_request_gives_the_same_bits(spill, long_case, ask, run, alone):
    case = long_case
    fields = {"prompt_logprobs": None, "max_tokens": case.num_tokens}
    lengths = (257 - case.num_tokens // 2, 256 - case.num_tokens // 2)  # both grow into a second page, of three
    engine = start(case, num_pages=3, prefix_cache=False, **spill)

    crowded = run(engine, *(ask(case, length, **fields) for length in lengths))

    assert engine.stats().num_preemptions > 0
    for length in lengths:
        assert said(crowded[f"r{length}"]) == alone(case, length, **fields), length


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_speculation_gives_the_same_bits_as_plain_decoding(dtype, toy_dir, ask, run, alone):
    case = load(toy_dir, dtype, num_draft_tokens=2)
    fields = {"temperature": 1.5, "seed": 4, "max_tokens": 3 * case.num_tokens}

    drafted = run(start(case, num_draft_tokens=2), ask(case, 40, **fields))["r40"]

    assert sum(chunk.num_drafted for chunk in drafted.chunks) > 0
    assert said(drafted) == alone(case, 40, **fields)


def test_the_mode_is_refused_where_it_cannot_hold(toy_dir, monkeypatch):
    model = load(toy_dir, "float32").loaded.model
    asked = EngineConfig(deterministic=True)

    with pytest.raises(ConfigError, match="device cpu only, not on meta"):
        needs_single_rows(asked, model, torch.float32, torch.device("meta"))
    monkeypatch.setattr(model.head, "forward", lambda x: torch.rand(x.shape[0], 512))
    with pytest.raises(ConfigError, match="self-test failed"):
        needs_single_rows(asked, model, torch.float32, CPU)
