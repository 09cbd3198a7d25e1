"""What a client asked for, after translation to token ids."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, Self

StructuredKind = Literal["json_object", "json_schema", "regex", "lark", "tool_call", "tool_call_required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. `seed` is set by whoever admits the request, so replays draw the same noise."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0  # 0 <= seed < 2**63
    top_k: int = 0  # 0 = all tokens
    min_p: float = 0.0  # least probability, as a fraction of the most probable token's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
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
class StructuredSpec:
    """A constraint on the answer's text; while thinking it applies after the end of the thoughts."""

    kind: StructuredKind
    schema: str = ""  # JSON schema, pattern, Lark grammar, or the JSON array of tools
    is_single_call: bool = False  # for tools: the block closes after one call


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate; the unit that router, workers and engine talk about."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams = field(default_factory=StopParams)
    model: str = ""
    structured: StructuredSpec | None = None
    thinking: bool = False  # generation starts inside the thoughts and leaves them with </think>
    thinking_budget: int | None = None  # thought tokens after which </think> is forced
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # left for the whole answer, from when the receiver takes the request
    key_name: str = ""  # the API key that pays for it
    tenant: str = ""  # fairness is between tenants
    cache_salt: str = ""  # requests share cached prefixes only with the same tenant and salt

    @property
    def max_total_tokens(self) -> int:
        """Upper bound of prompt plus answer, in tokens."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def within(self, deadline_s: float) -> Self:
        """The request with at most so many seconds left."""
        left_s = deadline_s if self.deadline_s is None else min(self.deadline_s, deadline_s)
        return dataclasses.replace(self, deadline_s=left_s)

    def after(self, elapsed_s: float) -> Self:
        """The request as it is to be passed on by somebody who has held it for `elapsed_s` seconds.

        A deadline travels as the time that is left, because the clocks of two hosts have nothing in common.
        """
        if self.deadline_s is None:
            return self
        return dataclasses.replace(self, deadline_s=self.deadline_s - elapsed_s)
