"""A completion body, checked: types, ranges, prompts as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsv4_cluster.frontend import fields
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.sampling_fields import SamplingFields, field_error, take_sampling_fields
from dsv4_cluster.tokenizer.encoding import ModelCodec, check_context
from dsv4_cluster.tokenizer.text import TextTokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint
MAX_PROMPTS = 128
MAX_STOP_STRINGS = 16  # the same bounds as deepseek-recipe has for chat
MAX_LOGPROBS = 20

_StopString = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """One checked request; `prompts` and `max_tokens` have one entry per prompt, each of which is answered n times."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int | None
    sampling: SamplingFields
    num_logprobs: int | None
    stop_strings: tuple[str, ...]
    is_stream: bool
    include_usage: bool


class _Body(BaseModel):
    """Types and ranges of everything but the prompt."""

    model_config = ConfigDict(strict=True, extra="ignore")

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stop: _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    stream: bool = False


def parse_completion(body: Mapping[str, Any], codec: ModelCodec, *, context_limit: int) -> CompletionJob:
    """Check and encode. CPU-bound. context_limit: largest prompt + answer, in tokens.

    Raises: ModelNotFoundError, FieldError, PromptTooLongError.
    """
    checked = fields.check_completion(body)
    codec.models.resolve(checked["model"])
    try:
        parsed = _Body.model_validate(checked)
    except ValidationError as err:
        raise field_error(err) from err
    sampling = take_sampling_fields(checked, vocab_size=codec.text.vocab_size)
    prompts = _encode_prompts(checked.get("prompt"), codec.text)
    if sampling.n * len(prompts) > MAX_PROMPTS:
        raise FieldError(
            f"n is {sampling.n} for {len(prompts)} prompts, together at most {MAX_PROMPTS} answers are given", param="n"
        )
    for prompt in prompts:
        check_context(len(prompt), parsed.max_tokens, context_limit)
    return CompletionJob(
        model=checked["model"],
        prompts=prompts,
        max_tokens=tuple(parsed.max_tokens or min(DEFAULT_MAX_TOKENS, context_limit - len(p)) for p in prompts),
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        seed=parsed.seed,
        sampling=sampling,
        num_logprobs=parsed.logprobs,
        stop_strings=(parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop),
        is_stream=parsed.stream,
        include_usage=fields.wants_usage(checked),
    )


def _encode_prompts(prompt: object, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """A string, token ids, or a list of either. Raises: FieldError."""
    if prompt is None:
        raise FieldError("prompt is missing", param="prompt")
    if isinstance(prompt, str):
        return (tuple(tokenizer.encode_prompt(prompt)),)
    if not isinstance(prompt, list) or not prompt:
        raise FieldError("prompt must be a string, a list of token ids, or a non-empty list of those", param="prompt")
    if isinstance(prompt[0], int):
        return (_token_ids(prompt, tokenizer.vocab_size),)
    if len(prompt) > MAX_PROMPTS:
        raise FieldError(f"prompt has {len(prompt)} entries, at most {MAX_PROMPTS} are taken", param="prompt")
    return tuple(
        tuple(tokenizer.encode_prompt(entry)) if isinstance(entry, str) else _token_ids(entry, tokenizer.vocab_size)
        for entry in prompt
    )


def _token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not value:
        raise FieldError("prompt must hold strings or non-empty lists of token ids", param="prompt")
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise FieldError(f"prompt holds {token_id!r:.40}, not a token id below {vocab_size}", param="prompt")
    return tuple(value)
