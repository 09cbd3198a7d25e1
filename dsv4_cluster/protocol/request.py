"""What a client asked for, after translation to token ids."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. `seed` is set by whoever admits the request, so replays draw the same noise."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0  # 0 <= seed < 2**63
    logprobs: int | None = None  # None: none; n: the chosen token and the n most probable
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When generation ends, besides max_tokens. Stop strings are matched above the engine, on text."""

    token_ids: tuple[int, ...] = ()  # the caller's stop ids; the engine adds the model's EOS unless ignore_eos
    strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate; the unit that router, workers and engine talk about."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams = field(default_factory=StopParams)
    model: str = ""
    thinking: bool = False
    arrival_s: float = 0.0

    @property
    def max_total_tokens(self) -> int:
        """Upper bound of prompt plus answer, in tokens."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens
