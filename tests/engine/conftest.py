"""A toy model shared by the engine tests; each test gets its own engine on it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from dsv4_cluster.clock import Clock
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.engine.loader import LoadedModel, load_model
from dsv4_cluster.kv.pools import KVPools
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams, StopParams
from dsv4_cluster.speculation.proposer import Proposer

MakeEngine = Callable[..., EngineCore]


@dataclass
class Answer:
    """Everything the chunks of one request said."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list | None = None
    finish_reason: FinishReason | None = None
    chunks: list[TokenChunk] = field(default_factory=list)

    def push(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or chunk.prompt_logprobs
        self.finish_reason = chunk.finish_reason


@pytest.fixture(scope="session")
def toy_model(toy_dir) -> LoadedModel:
    return load_model(
        toy_dir, EngineConfig(dtype="float32"), KVConfig(num_pages=1), SpeculationConfig(), ParallelState()
    )


@pytest.fixture(scope="session")
def toy_model_mtp(toy_dir) -> LoadedModel:
    speculation = SpeculationConfig(num_draft_tokens=1)
    return load_model(toy_dir, EngineConfig(dtype="float32"), KVConfig(num_pages=1), speculation, ParallelState())


@pytest.fixture(scope="session")
def toy_model_deterministic(toy_dir) -> LoadedModel:
    """bfloat16: with the C kernels one pass computes all rows, without them each row takes its own."""
    engine = EngineConfig(dtype="bfloat16", deterministic=True)
    return load_model(toy_dir, engine, KVConfig(num_pages=1), SpeculationConfig(), ParallelState())


@pytest.fixture
def make_engine(toy_model, request) -> MakeEngine:
    """make_engine(num_pages=, max_num_seqs=, max_num_batched_tokens=, **kv): a fresh engine whose pools hold NaN.

    num_draft_tokens: not 0 = with the MTP layer. proposer: makes the drafts instead of it. is_deterministic: equal bits
    however rows are batched; without drafts.
    """

    def make(
        *,
        num_pages: int = 24,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 2048,
        clock: Clock | None = None,
        num_draft_tokens: int | str = 0,
        proposer: Proposer | None = None,
        is_deterministic: bool = False,
        **kv_fields,
    ) -> EngineCore:
        kv = KVConfig(num_pages=num_pages, **kv_fields)
        engine = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        name = "toy_model_mtp" if num_draft_tokens else "toy_model_deterministic"
        model = request.getfixturevalue(name) if num_draft_tokens or is_deterministic else toy_model
        pools = KVPools.allocate(model.layout, num_pages, max_num_seqs, model.device)
        _poison(pools)
        loaded = replace(model, pools=pools, max_model_len=num_pages * 256)
        speculation = SpeculationConfig(num_draft_tokens=num_draft_tokens)
        return EngineCore(loaded, engine, kv, speculation, proposer=proposer, clock=clock)

    return make


def _poison(pools: KVPools) -> None:
    """Unwritten rows read as NaN: an engine that looks at one shows it at once."""
    for cache in pools.layer_caches:
        for rows in (cache.window, cache.compressed, cache.indexer, cache.state, cache.indexer_state, cache.hidden):
            if rows is not None:
                slots = torch.arange(rows.num_pages * rows.rows_per_page)
                rows.write(slots, torch.full((len(slots), rows.format.dim), float("nan")))


@pytest.fixture
def make_request() -> Callable[..., GenerationRequest]:
    """make_request(name, prompt ids or length, fields={request fields}, **sampling and stop fields)."""

    def make(
        name: str,
        prompt: list[int] | int,
        *,
        token_ids: tuple[int, ...] = (),
        ignore_eos: bool = True,
        min_tokens: int = 0,
        fields: dict | None = None,
        **sampling,
    ) -> GenerationRequest:
        if isinstance(prompt, int):
            generator = torch.Generator().manual_seed(prompt)
            prompt = torch.randint(16, 500, (prompt,), generator=generator).tolist()
        sampling = {"max_tokens": 8, "temperature": 0.0, "logprobs": 3, "prompt_logprobs": 0} | sampling
        return GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**sampling),
            stop=StopParams(token_ids=token_ids, ignore_eos=ignore_eos, min_tokens=min_tokens),
            **(fields or {}),
        )

    return make


@pytest.fixture
def run() -> Callable[..., dict[str, Answer]]:
    """run(engine, *requests): add all, step to the end, check the accounts after every step."""

    def run_to_end(engine: EngineCore, *requests: GenerationRequest) -> dict[str, Answer]:
        answers = {request.request_id: Answer() for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work():
            for chunk in engine.step().chunks:
                answers.setdefault(chunk.request_id, Answer()).push(chunk)
            engine.check()
        return answers

    return run_to_end


@pytest.fixture
def step_until_chunk() -> Callable[[EngineCore], TokenChunk]:
    """step_until_chunk(engine): the first chunk of the next step that has one."""

    def step(engine: EngineCore) -> TokenChunk:
        while not (chunks := engine.step().chunks):
            engine.check()
        return chunks[0]

    return step


@pytest.fixture
def assert_same() -> Callable[[Answer, Answer], None]:
    """Equal tokens, log-probabilities within 1e-4 (the fp32 bound of the identities)."""

    def check(ours: Answer, theirs: Answer) -> None:
        assert ours.token_ids == theirs.token_ids
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert _distance(one, other) <= 1e-4
        if ours.prompt_logprobs and theirs.prompt_logprobs:
            for one, other in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
                assert _distance(one, other) <= 1e-4

    return check


def _distance(one: dict[int, float], other: dict[int, float]) -> float:
    common = one.keys() & other.keys()
    assert common, (one, other)
    return max(abs(one[token_id] - other[token_id]) for token_id in common)
