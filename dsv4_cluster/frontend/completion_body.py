"""A completion body, checked: types, ranges, prompts as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.frontend import fields
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.sampling_fields import SamplingFields, field_error, take_sampling_fields
from dsv4_cluster.frontend.turn import check_structured
from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.tokenizer.answer_form import completion_form
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
    structured: StructuredSpec | None
    echoes: bool
    is_echo_only: bool  # max_tokens is 0: one token is generated, because that computes the prompt, and not shown
    user_id: str
    priority: int


class CompletionBody(BaseModel):
    """Types and ranges of everything but the prompt."""

    model_config = ConfigDict(strict=True, extra="ignore")

    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stop: _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    stream: bool = False
    echo: bool = False
    suffix: str = ""
    response_format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})


def parse_completion(
    body: Mapping[str, Any], codec: ModelCodec, *, context_limit: int, ignores_unknown: bool = False
) -> CompletionJob:
    """Check and encode. CPU-bound. context_limit: largest prompt + answer, in tokens.

    ignores_unknown: fields that this server does not know are dropped.
    Raises: ModelNotFoundError, FieldError, PromptTooLongError.
    """
    checked = fields.check_completion(body, ignores_unknown=ignores_unknown)
    codec.models.resolve(checked["model"])
    try:
        parsed = CompletionBody.model_validate(checked)
    except ValidationError as err:
        raise field_error(err) from err
    sampling = take_sampling_fields(checked, vocab_size=codec.text.vocab_size)
    _check_echo(parsed, sampling)
    structured = _answer_form(parsed, sampling)
    prompts = _encode_prompts(checked.get("prompt"), parsed.suffix, codec.text)
    if sampling.n * len(prompts) > MAX_PROMPTS:
        raise FieldError(
            f"n is {sampling.n} for {len(prompts)} prompts, together at most {MAX_PROMPTS} answers are given", param="n"
        )
    for prompt in prompts:
        check_context(len(prompt), parsed.max_tokens or None, context_limit)
    return CompletionJob(
        model=checked["model"],
        prompts=prompts,
        max_tokens=tuple(_max_tokens(parsed.max_tokens, context_limit - len(prompt)) for prompt in prompts),
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        seed=parsed.seed,
        sampling=sampling,
        num_logprobs=parsed.logprobs,
        stop_strings=(parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop),
        is_stream=parsed.stream,
        include_usage=fields.wants_usage(checked),
        structured=structured,
        echoes=parsed.echo,
        is_echo_only=parsed.max_tokens == 0,
        user_id=fields.take_user_id(checked),
        priority=fields.take_priority(checked),
    )


def _max_tokens(asked: int | None, room: int) -> int:
    return min(DEFAULT_MAX_TOKENS, room) if asked is None else max(1, asked)


def _check_echo(parsed: CompletionBody, sampling: SamplingFields) -> None:
    """Raises: FieldError."""
    if parsed.max_tokens == 0 and not parsed.echo:
        raise FieldError("max_tokens is 0, which needs echo = true", param="max_tokens")
    if parsed.echo and parsed.suffix:
        raise FieldError("echo cannot be combined with suffix", param="echo")
    if parsed.echo and parsed.logprobs is not None and sampling.n > 1:
        raise FieldError("echo with logprobs takes n = 1: a prompt's logprobs are computed once", param="n")


def _answer_form(parsed: CompletionBody, sampling: SamplingFields) -> StructuredSpec | None:
    """Raises: FieldError."""
    try:
        spec = completion_form(parsed.response_format)
    except InvalidRequestError as err:
        raise FieldError(err.message, param="response_format") from err
    if spec is not None:
        check_structured(spec, sampling, param="response_format")
    return spec


def _encode_prompts(prompt: object, suffix: str, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """A string, token ids, or a list of either; with a suffix, strings. Raises: FieldError."""
    if suffix:
        return _encode_gaps(prompt, suffix, tokenizer)
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


def _encode_gaps(prompt: object, suffix: str, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    prefixes = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prefixes, list) or not 0 < len(prefixes) <= MAX_PROMPTS:
        raise FieldError(f"with suffix, prompt must be a string or 1..{MAX_PROMPTS} of them", param="prompt")
    if not all(isinstance(prefix, str) for prefix in prefixes):
        raise FieldError("with suffix, prompt must hold strings", param="prompt")
    return tuple(tuple(tokenizer.encode_gap(prefix, suffix)) for prefix in prefixes)


def _token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not value:
        raise FieldError("prompt must hold strings or non-empty lists of token ids", param="prompt")
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise FieldError(f"prompt holds {token_id!r:.40}, not a token id below {vocab_size}", param="prompt")
    return tuple(value)
