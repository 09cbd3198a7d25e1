"""What is asked: conversations of one or more turns, all of them known before the first request is sent.

The whole workload follows from its spec and salt. Only the answers that later turns repeat come from the server.
"""

import random
from dataclasses import dataclass, replace
from typing import Literal

from dsv4_cluster.bench.words import random_text
from dsv4_cluster.errors import ConfigError

WorkloadKind = Literal["fixed", "random", "shared-prefix", "multi-turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Shape of a workload; lengths in words, which are tokens of the V4 vocabulary.

    fixed: every request has `input_tokens` and asks for `output_tokens`.
    random: both lengths uniform between `range_ratio` times the value and the value.
    shared-prefix: one of `num_prefixes` texts of `prefix_tokens`, then `input_tokens` of its own.
    multi-turn: conversations of `num_turns`; every turn repeats what was said, answers included, and adds
    `input_tokens`. A system text of `prefix_tokens` (0 = none) comes first; there are `num_prefixes` of them.
    """

    kind: WorkloadKind = "random"
    num_requests: int = 64
    input_tokens: int = 512
    output_tokens: int = 64
    range_ratio: float = 0.8
    prefix_tokens: int = 0
    num_prefixes: int = 1
    num_turns: int = 4
    seed: int = 0  # of lengths, sampling and arrivals
    text_seed: int = 0  # of the words: other words find nothing of an earlier run in a prefix cache

    def __post_init__(self) -> None:
        """Raises: ConfigError that names the field."""
        for name in ("num_requests", "input_tokens", "output_tokens", "num_prefixes", "num_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 0 < self.range_ratio <= 1:
            raise ConfigError(f"range_ratio is {self.range_ratio}, expected a value in (0, 1]")
        if self.prefix_tokens < 0:
            raise ConfigError(f"prefix_tokens is {self.prefix_tokens}, expected at least 0")
        if self.kind == "shared-prefix" and self.prefix_tokens == 0:
            raise ConfigError("prefix_tokens is 0, but a shared-prefix workload needs a prefix")

    @property
    def turns_per_conversation(self) -> int:
        """Requests that one conversation makes."""
        return self.num_turns if self.kind == "multi-turn" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation, without the history in front of it."""

    text: str
    num_input_tokens: int  # planned, history and template excluded
    num_output_tokens: int
    seed: int  # of the request's sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that follow each other. `prefix` is the system message of a chat, or the start of a raw prompt."""

    index: int
    prefix: str
    turns: tuple[Turn, ...]


def make_workload(spec: WorkloadSpec, *, text_salt: str = "") -> list[Conversation]:
    """All conversations, `spec.num_requests` turns in total; the last conversation may be shorter.

    text_salt: another salt, other texts of the same lengths, so that one run's prefixes are unknown to the next.
    """
    lengths, texts = random.Random(f"lengths {spec.seed}"), random.Random(f"texts {spec.text_seed} {text_salt}")
    prefixes = [random_text(texts, spec.prefix_tokens) for _ in range(spec.num_prefixes)]
    conversations: list[Conversation] = []
    remaining = spec.num_requests
    while remaining > 0:
        num_turns = min(spec.turns_per_conversation, remaining)
        turns = tuple(_turn(spec, lengths, texts) for _ in range(num_turns))
        index = len(conversations)
        conversations.append(Conversation(index=index, prefix=prefixes[index % len(prefixes)], turns=turns))
        remaining -= num_turns
    return conversations


def warmup_workload(spec: WorkloadSpec, num_requests: int) -> list[Conversation]:
    """Single requests about as long as the workload's, of other texts."""
    if num_requests == 0:
        return []
    warmup = replace(spec, kind="random", num_requests=num_requests)
    return make_workload(warmup, text_salt="warm-up")


def _turn(spec: WorkloadSpec, lengths: random.Random, texts: random.Random) -> Turn:
    num_input, num_output = spec.input_tokens, spec.output_tokens
    if spec.kind == "random":
        num_input = _draw(lengths, num_input, spec.range_ratio)
        num_output = _draw(lengths, num_output, spec.range_ratio)
    return Turn(
        text=random_text(texts, num_input),
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        seed=lengths.getrandbits(31),
    )


def _draw(rng: random.Random, largest: int, range_ratio: float) -> int:
    return rng.randint(max(1, round(largest * range_ratio)), largest)
