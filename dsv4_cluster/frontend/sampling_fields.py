"""Sampling fields that both endpoints take in the same form: OpenAI's penalties and bias, and vLLM's extensions."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.protocol.copies import MAX_COPIES
from dsv4_cluster.protocol.ranges import MAX_BIAS, MAX_PENALTY, MAX_REPETITION, MIN_REPETITION
from dsv4_cluster.protocol.request import SamplingParams, StopParams

_MAX_INT = 2**31 - 1
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class SamplingFields(BaseModel):
    """Checked values; the defaults ask for nothing. A field is taken by name, whatever else the body holds."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    n: int = Field(1, ge=1, le=MAX_COPIES)
    top_k: int = Field(0, ge=-1, le=_MAX_INT)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION, le=MAX_REPETITION)
    logit_bias: dict[str, _Bias] = Field(default_factory=dict)
    min_tokens: int = Field(0, ge=0, le=_MAX_INT)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False

    def sampling_params(
        self,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Add what each endpoint resolves in its own way. Raises: FieldError when min_tokens exceeds max_tokens."""
        if self.min_tokens > max_tokens:
            raise FieldError(f"min_tokens is {self.min_tokens}, above max_tokens = {max_tokens}", param="min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def stop_params(self, stop_strings: Sequence[str], *, eos_token_id: int) -> StopParams:
        """Stop ids are the caller's, and EOS unless it is ignored."""
        own = tuple(dict.fromkeys(self.stop_token_ids))
        eos = () if self.ignore_eos or eos_token_id in own else (eos_token_id,)
        return StopParams(
            token_ids=(*own, *eos),
            strings=tuple(stop_strings),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )


def take_sampling_fields(body: dict[str, Any], *, vocab_size: int) -> SamplingFields:
    """Remove the fields from `body` and check them. Raises: FieldError with the field, the value and the limit."""
    own = {name: body.pop(name) for name in SamplingFields.model_fields if name in body}
    try:
        fields = SamplingFields.model_validate(own)
    except ValidationError as err:
        raise field_error(err) from err
    for token_id in fields.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise FieldError(
                f"stop_token_ids holds {token_id}, not a token id below {vocab_size}", param="stop_token_ids"
            )
    for key in fields.logit_bias:
        is_id = key.isascii() and key.isdecimal() and len(key) <= len(str(vocab_size)) and int(key) < vocab_size
        if not is_id or key != str(int(key)):
            raise FieldError(
                f"logit_bias has the key {key!r:.40}, not a token id below {vocab_size}", param="logit_bias"
            )
    return fields


def field_error(err: ValidationError) -> FieldError:
    """The first of pydantic's complaints, with the value it is about."""
    first = err.errors()[0]
    name = str(first["loc"][0])
    where = "".join(f"[{part!r}]" for part in first["loc"][1:])
    return FieldError(f"{name}{where:.40} is {first['input']!r:.40}: {first['msg']}", param=name)
