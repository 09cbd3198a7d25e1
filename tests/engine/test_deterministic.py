"""Deterministic mode: tokens and log-probabilities are the same bits however a request is batched, cut or moved."""

from dataclasses import replace

import pytest
import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.engine.loader import load_model
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.parallel.state import ParallelState
from dsv4_kernels.native.library import is_available

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not is_available(CPU, torch.float32), reason="no AVX-512 BF16 or no C compiler on this machine"
)
LENGTHS = (1, 3, 5, 40, 127, 128, 130, 300)
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=["bfloat16"])
def loaded(request, toy_dir):
    engine = EngineConfig(dtype=request.param, deterministic=True)
    return load_model(toy_dir, engine, KVConfig(num_pages=1), SpeculationConfig(), ParallelState())


@pytest.fixture
def start(loaded):
    def make(max_num_batched_tokens: int = 2048) -> EngineCore:
        pools = KVPools.allocate(loaded.layout, 32, 8, CPU)
        engine = EngineConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens, deterministic=True)
        return EngineCore(
            replace(loaded, pools=pools, max_model_len=4096), engine, KVConfig(num_pages=32), SpeculationConfig()
        )

    return make


@pytest.fixture
def ask(make_request):
    def request(length: int, name: str):
        return make_request(name, length, max_tokens=NUM_TOKENS, logprobs=5, prompt_logprobs=3)

    return request


def said(answer):
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs


def alone(start, ask, run, length):
    return said(run(start(), ask(length, f"r{length}"))[f"r{length}"])


def test_a_mixed_batch_gives_the_same_bits_as_each_alone(start, ask, run):
    together = run(start(), *(ask(length, f"r{length}") for length in LENGTHS))

    for length in LENGTHS:
        assert said(together[f"r{length}"]) == alone(start, ask, run, length), length


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 127, 128, 129])
def test_chunks_of_any_size_give_the_same_bits_as_the_whole_prompt(cut, start, ask, run):
    cut_up = run(start(max_num_batched_tokens=cut), ask(300, "r300"))["r300"]

    assert said(cut_up) == alone(start, ask, run, 300)


@pytest.mark.parametrize("length", [3, 128, 130, 300])
def test_export_and_import_give_the_same_bits_as_local(length, start, ask, run, step_until_chunk):
    request = ask(length, f"r{length}")
    prefill, decode = start(), start()
    prefill.add(request, hold_after_prefill=True)
    first = step_until_chunk(prefill)
    exported = prefill.export_sequence(request.request_id)

    assert decode.import_sequence(request, first.token_ids[0], exported.segments)
    rest = run(decode)[request.request_id]

    tokens, logprobs, _ = alone(start, ask, run, length)
    assert [*first.token_ids, *rest.token_ids] == tokens
    assert [*first.logprobs, *rest.logprobs] == logprobs


def test_a_prefix_computed_for_another_prompt_gives_the_same_bits_as_cold(start, make_request, run):
    prompt = make_request("x", 300).prompt_token_ids
    fields = {"max_tokens": NUM_TOKENS, "logprobs": 5, "prompt_logprobs": None}
    cold = run(start(), make_request("cold", list(prompt), **fields))["cold"]
    engine = start(max_num_batched_tokens=96)
    run(engine, make_request("other", [*prompt[:270], *range(20, 90)], **fields))

    warm = run(engine, make_request("warm", list(prompt), **fields))["warm"]

    assert warm.chunks[0].num_cached_tokens >= 128
    assert said(warm) == said(cold)
