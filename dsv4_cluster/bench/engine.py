"""`dsv4 bench engine`: prefill, decode, prefix hits and speculation of one checkpoint in this process."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from dsv4_cluster.bench.engine_cases import DecodeSample, answer_tokens, random_prompt, time_decode, time_first_token
from dsv4_cluster.bench.engine_report import EngineRun, Measurement
from dsv4_cluster.bench.hardware import describe_hardware
from dsv4_cluster.bench.roofline import bytes_per_expert_weight, decode_weight_bytes, read_bandwidth
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import PAGE_TOKENS, KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.engine.loader import compute_dtype
from dsv4_cluster.errors import ConfigError

Part = Literal["prefill", "decode", "prefix", "speculation"]
PARTS: tuple[Part, ...] = ("prefill", "decode", "prefix", "speculation")
OnMeasurement = Callable[[Measurement], None]
_MAX_BATCHED_TOKENS = 2048
_TAIL_TOKENS = 16  # of a prompt behind its cached prefix
_SPECULATION_CONTEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """What to measure, on what."""

    checkpoint: Path
    parts: tuple[Part, ...] = PARTS
    prefill_lengths: tuple[int, ...] = (128, 512, 2048)
    decode_batches: tuple[int, ...] = (1, 4, 8)
    decode_contexts: tuple[int, ...] = (128, 2048)
    prefix_tokens: int = 2560
    draft_counts: tuple[int, ...] = (0, 1, 2, 3, 4)
    num_decode_steps: int = 16
    num_repeats: int = 5
    num_warmup: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    device: str = "cpu"
    num_threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises: ConfigError that names the field."""
        for name in ("parts", "prefill_lengths", "decode_batches", "decode_contexts", "draft_counts"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty")
        for name in ("prefill_lengths", "decode_batches", "decode_contexts"):
            if min(getattr(self, name)) < 1:
                raise ConfigError(f"{name} holds {min(getattr(self, name))}, expected at least 1")
        for name in ("prefix_tokens", "num_decode_steps", "num_repeats", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")

    @property
    def num_timed_steps(self) -> int:
        """Decode steps per measurement, warm-up blocks included."""
        return (self.num_warmup + self.num_repeats) * self.num_decode_steps

    @property
    def num_measurements(self) -> int:
        """Most results that a run delivers."""
        counts: dict[Part, int] = {
            "prefill": len(self.prefill_lengths),
            "decode": len(self.decode_batches) * len(self.decode_contexts),
            "prefix": 3,
            "speculation": len(self.draft_counts),
        }
        return sum(counts[part] for part in self.parts)


def run_engine(bench: EngineBench, on_measurement: OnMeasurement) -> tuple[EngineRun, list[Measurement]]:
    """Measure everything. Sets torch's thread count. Raises: CheckpointError, ConfigError."""
    torch.set_num_threads(bench.num_threads)
    session = _Session(bench)
    measurements = []
    for part in bench.parts:
        for measurement in session.measure(part):
            on_measurement(measurement)
            measurements.append(measurement)
    return session.describe(), measurements


class _Session:
    """One run: the engine without drafts is loaded once and shared by all parts."""

    def __init__(self, bench: EngineBench) -> None:
        self._bench = bench
        self._rng = random.Random(bench.seed)
        self._engine_config = EngineConfig(
            dtype=bench.dtype,
            device=bench.device,
            max_num_seqs=max(bench.decode_batches),
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            num_threads=bench.num_threads,
        )
        self._dtype = compute_dtype(self._engine_config, torch.device(bench.device))
        self._bytes_per_s = read_bandwidth(bench.device)
        self._engine = self._load(num_drafts=0)
        self._expert_weight_bytes = bytes_per_expert_weight(self._engine.loaded.model, self._engine.config)
        self._unavailable: dict[str, str] = {}

    def measure(self, part: Part) -> Iterator[Measurement]:
        """All measurements of a part."""
        parts = {
            "prefill": self._prefill,
            "decode": self._decode,
            "prefix": self._prefix,
            "speculation": self._speculation,
        }
        return parts[part]()

    def describe(self) -> EngineRun:
        """The head of the result."""
        bench, config = self._bench, self._engine.config
        on_gpu = torch.device(bench.device).type == "cuda"
        return EngineRun(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            version=version("dsv4-cluster"),
            torch_version=torch.__version__,
            hardware=describe_hardware(torch.cuda.get_device_name(bench.device) if on_gpu else None),
            checkpoint=bench.checkpoint.name,
            shape={
                "hidden_size": config.hidden_size,
                "num_hidden_layers": config.num_hidden_layers,
                "n_routed_experts": config.n_routed_experts,
                "num_experts_per_tok": config.num_experts_per_tok,
                "vocab_size": config.vocab_size,
            },
            dtype=str(self._dtype).removeprefix("torch."),
            kv_cache_dtype=bench.kv_cache_dtype,
            num_threads=bench.num_threads,
            read_gb_per_s=self._bytes_per_s / 1e9,
            num_warmup=bench.num_warmup,
            num_repeats=bench.num_repeats,
            num_decode_steps=bench.num_decode_steps,
            seed=bench.seed,
            unavailable=self._unavailable,
        )

    def _prefill(self) -> Iterator[Measurement]:
        for length in self._bench.prefill_lengths:
            firsts = [time_first_token(self._engine, self._prompt(length)) for _ in range(self._num_runs)]
            seconds = [first.seconds for first in firsts[self._bench.num_warmup :]]
            yield Measurement(
                name="prefill",
                params={"tokens": length},
                unit="tok/s",
                is_higher_better=True,
                samples=tuple(length / s for s in seconds),
            )

    def _decode(self) -> Iterator[Measurement]:
        for context in self._bench.decode_contexts:
            for batch in self._bench.decode_batches:
                samples = self._decode_samples(self._engine, batch, context, num_drafts=0)
                weight_bytes = decode_weight_bytes(
                    self._engine.config, self._dtype, batch, bytes_per_expert_weight=self._expert_weight_bytes
                )
                step_s = sorted(sample.seconds / sample.num_steps for sample in samples)[len(samples) // 2]
                yield Measurement(
                    name="decode",
                    params={"batch": batch, "context": context},
                    unit="tok/s",
                    is_higher_better=True,
                    samples=tuple(sample.num_tokens / sample.seconds for sample in samples),
                    details={
                        "step_ms": step_s * 1e3,
                        "weight_mb_per_step": weight_bytes / 1e6,
                        "read_fraction": weight_bytes / step_s / self._bytes_per_s,
                    },
                )

    def _prefix(self) -> Iterator[Measurement]:
        """Time to the first token of prefix + tail: prefix unknown, then known."""
        length = self._bench.prefix_tokens
        cold, warm = [], []
        for _ in range(self._num_runs):
            prefix = self._prompt(length)
            cold.append(time_first_token(self._engine, prefix + self._prompt(_TAIL_TOKENS)))
            warm.append(time_first_token(self._engine, prefix + self._prompt(_TAIL_TOKENS)))
        cold, warm = cold[self._bench.num_warmup :], warm[self._bench.num_warmup :]
        for name, firsts in (("prefix-cold", cold), ("prefix-warm", warm)):
            yield Measurement(
                name=name,
                params={"tokens": length},
                unit="ms",
                is_higher_better=False,
                samples=tuple(first.seconds * 1e3 for first in firsts),
                details={"cached_tokens": min(first.num_cached_tokens for first in firsts)},
            )
        yield Measurement(
            name="prefix-speedup",
            params={"tokens": length},
            unit="x",
            is_higher_better=True,
            samples=tuple(before.seconds / after.seconds for before, after in zip(cold, warm, strict=True)),
        )

    def _speculation(self) -> Iterator[Measurement]:
        """Decode of one sequence with k drafts per step, each k on an engine of its own."""
        for num_drafts in self._bench.draft_counts:
            try:
                engine = self._engine if num_drafts == 0 else self._load(num_drafts)
            except ConfigError as err:
                self._unavailable["speculation"] = err.message
                return
            samples = self._decode_samples(engine, 1, _SPECULATION_CONTEXT, num_drafts)
            yield Measurement(
                name="speculation",
                params={"drafts": num_drafts},
                unit="tok/s",
                is_higher_better=True,
                samples=tuple(sample.num_tokens / sample.seconds for sample in samples),
                details=_acceptance(samples),
            )

    def _decode_samples(self, engine: EngineCore, batch: int, context: int, num_drafts: int) -> list[DecodeSample]:
        prompts = [self._prompt(context) for _ in range(batch)]
        samples = time_decode(
            engine,
            prompts,
            num_blocks=self._num_runs,
            num_steps=self._bench.num_decode_steps,
            max_tokens=self._answer_tokens(batch, context, num_drafts),
        )
        return samples[self._bench.num_warmup :]

    @property
    def _num_runs(self) -> int:
        return self._bench.num_warmup + self._bench.num_repeats

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return random_prompt(self._rng, self._engine, num_tokens)

    def _answer_tokens(self, batch: int, context: int, num_drafts: int) -> int:
        return answer_tokens(
            batch_size=batch,
            context=context,
            num_steps=self._bench.num_timed_steps,
            num_drafts=num_drafts,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        )

    def _load(self, num_drafts: int) -> EngineCore:
        """An engine whose pool holds the largest measurement without preemption."""
        bench = self._bench
        kv = KVConfig(kv_cache_dtype=bench.kv_cache_dtype, num_pages=self._num_pages())
        speculation = SpeculationConfig(num_draft_tokens=num_drafts)
        return EngineCore.from_checkpoint(bench.checkpoint, self._engine_config, kv, speculation)

    def _num_pages(self) -> int:
        bench = self._bench
        alone = [*bench.prefill_lengths, bench.prefix_tokens + _TAIL_TOKENS]
        alone.append(_SPECULATION_CONTEXT + self._answer_tokens(1, _SPECULATION_CONTEXT, max(bench.draft_counts)))
        batch, context = max(bench.decode_batches), max(bench.decode_contexts)
        together = batch * _pages(context + self._answer_tokens(batch, context, 0))
        return max(together, *(_pages(length + 1) for length in alone))


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)


def _acceptance(samples: list[DecodeSample]) -> dict[str, float]:
    num_drafted = sum(sample.num_drafted for sample in samples)
    num_tokens, num_steps = sum(s.num_tokens for s in samples), sum(s.num_steps for s in samples)
    accepted = sum(sample.num_accepted for sample in samples)
    rate = {"acceptance": accepted / num_drafted} if num_drafted else {}
    return {**rate, "tokens_per_step": num_tokens / num_steps}
