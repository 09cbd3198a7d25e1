"""Our engine against the transformers implementation: same checkpoint, same tokens, same threads, same minutes.

Each side has a process of its own, so that neither runs with what the other sets up for its process: our engine takes
the place of torch's CPU allocator, and transformers computes a long prompt two to three times faster with ours.

Both sides run bf16 on CPU. The other side runs as fast as it can be asked to: `experts_implementation="grouped_mm"`,
logits of the last row only, plain forward calls with its own cache instead of `generate`. Our side is the whole engine:
scheduling, sampling and token delivery are inside the measured time. Every quantity is measured in alternating rounds
after a warm-up, so that a change in the load of the machine meets both sides; medians are reported.
"""

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams, StopParams
from dsv4_cluster.weights.reader import Checkpoint

BATCH_SIZES = (1, 8)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured. The defaults are those of the published ratios."""

    prefill_tokens: int = 2048
    decode_context: int = 512  # prompt tokens per sequence before decoding starts
    decode_tokens: int = 24  # measured decode steps per round
    rounds: int = 5
    num_threads: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians of one quantity over the rounds, seconds. A decode round is the median of its steps."""

    ours_s: float
    transformers_s: float
    ours_rounds_s: tuple[float, ...]
    transformers_rounds_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times faster we are."""
        return self.transformers_s / self.ours_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements of one checkpoint."""

    workload: Workload
    torch_version: str
    transformers_version: str
    measurements: dict[str, Measurement]  # prefill_2048 (or the workload's length), decode_b1, decode_b8

    def to_json(self) -> dict[str, object]:
        """Plain values for a JSON report; `ratios` first."""
        return {
            "ratios": {name: round(m.ratio, 3) for name, m in self.measurements.items()},
            "measurements": {name: asdict(m) for name, m in self.measurements.items()},
            "workload": asdict(self.workload),
            "torch": self.torch_version,
            "transformers": self.transformers_version,
            "transformers_settings": {"dtype": "bfloat16", "experts_implementation": "grouped_mm"},
        }


def compare_transformers(checkpoint: str | Path, workload: Workload | None = None) -> Comparison:
    """Load the checkpoint on both sides and measure.

    Raises: ConfigError when transformers is not installed; what a side raises, BrokenProcessPool when it dies.
    """
    workload = workload or Workload()
    if find_spec("transformers") is None:
        raise ConfigError(
            "compare-transformers needs the transformers library: install the `dev` extra of this package"
        )
    vocab = Checkpoint.open(checkpoint).config.vocab_size
    with _process() as ours, _process() as theirs:

        def measure(quantity: str, batch_size: int, num_tokens: int) -> Measurement:
            def take(process: ProcessPoolExecutor, side: Callable[..., "_Side"], seed: int) -> float:
                prompts = _prompts(batch_size, num_tokens, vocab, seed)
                return process.submit(_take, side, str(checkpoint), workload, quantity, prompts).result()

            return _alternate(lambda seed: take(ours, _Ours, seed), lambda seed: take(theirs, _Theirs, seed), workload)

        measurements = {f"prefill_{workload.prefill_tokens}": measure("prefill", 1, workload.prefill_tokens)}
        for batch_size in BATCH_SIZES:
            measurements[f"decode_b{batch_size}"] = measure("decode", batch_size, workload.decode_context)
    return Comparison(workload, torch.__version__, version("transformers"), measurements)


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _take(
    side: Callable[..., "_Side"], checkpoint: str, workload: Workload, quantity: str, prompts: list[list[int]]
) -> float:
    """In the side's process: one measurement in seconds."""
    loaded = _load(side, checkpoint, workload)
    gc.collect()
    return loaded.prefill(prompts) if quantity == "prefill" else loaded.decode(prompts, workload)


@cache
def _load(side: Callable[..., "_Side"], checkpoint: str, workload: Workload) -> "_Side":
    torch.set_num_threads(workload.num_threads)
    return side(checkpoint, workload)


class _Side(Protocol):
    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds until the first token is there."""

    def decode(self, prompts: list[list[int]], workload: Workload) -> float:
        """Median seconds of a step that gives every sequence one token."""


class _Theirs:
    """The transformers model."""

    def __init__(self, checkpoint: str, workload: Workload) -> None:  # noqa: ARG002, as of the other side
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.DeepseekV4ForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        ).eval()

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds until the first token is chosen."""
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        self._forward(ids, None)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], workload: Workload) -> float:
        """Median seconds of a decode step of the whole batch, its own cache."""
        token_ids, cache = self._forward(torch.tensor(prompts), None)
        steps = []
        for _ in range(workload.decode_tokens):
            started = time.perf_counter()
            token_ids, cache = self._forward(token_ids, cache)
            token_ids.tolist()
            steps.append(time.perf_counter() - started)
        return statistics.median(steps)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, cache: object) -> tuple[torch.Tensor, object]:
        out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values


class _Ours:
    """The engine with its default settings."""

    def __init__(self, checkpoint: str, workload: Workload) -> None:
        engine = EngineConfig(
            dtype="bfloat16",
            max_num_seqs=max(BATCH_SIZES),
            max_num_batched_tokens=max(2048, workload.prefill_tokens),
            num_threads=workload.num_threads,
        )
        self._engine = EngineCore.from_checkpoint(checkpoint, engine, KVConfig(num_pages=256), SpeculationConfig())
        self._num_requests = 0

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds from `add` until the first token is delivered."""
        started = time.perf_counter()
        self._add(prompts, max_tokens=1)
        while self._engine.has_work():
            self._engine.step()
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], workload: Workload) -> float:
        """Median seconds of a step that gives every sequence one token."""
        ids = self._add(prompts, max_tokens=workload.decode_tokens + 8)
        delivered: set[str] = set()
        while len(delivered) < len(prompts):
            delivered.update(chunk.request_id for chunk in self._engine.step().chunks)
        steps = []
        for _ in range(workload.decode_tokens):
            started = time.perf_counter()
            chunks = self._engine.step().chunks
            steps.append(time.perf_counter() - started)
            assert len(chunks) == len(prompts), (len(chunks), len(prompts))
        for request_id in ids:
            self._engine.abort(request_id)
        return statistics.median(steps)

    def _add(self, prompts: list[list[int]], *, max_tokens: int) -> list[str]:
        ids = []
        for prompt in prompts:
            self._num_requests += 1
            request = GenerationRequest(
                request_id=f"compare-{self._num_requests}",
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                stop=StopParams(ignore_eos=True),
            )
            self._engine.add(request)
            ids.append(request.request_id)
        return ids


def _alternate(ours: Callable[[int], float], theirs: Callable[[int], float], workload: Workload) -> Measurement:
    """One warm-up round, then `rounds` alternating rounds; every round has fresh random tokens (no prefix hits)."""
    ours_s, theirs_s = [], []
    for round_id in range(workload.rounds + 1):
        seed = workload.seed + round_id
        ours_s.append(ours(seed))
        theirs_s.append(theirs(seed))
    return Measurement(
        statistics.median(ours_s[1:]), statistics.median(theirs_s[1:]), tuple(ours_s[1:]), tuple(theirs_s[1:])
    )


def _prompts(num_prompts: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed * 1000 + num_prompts)
    rows: list[list[int]] = torch.randint(0, vocab_size, (num_prompts, num_tokens), generator=generator).tolist()
    return rows
