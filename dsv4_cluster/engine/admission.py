"""Checks on a request before the engine accepts it, each naming the field, the value and the limit."""

import math

from dsv4_cluster.errors import InvalidRequestError, PromptTooLongError
from dsv4_cluster.protocol.ranges import MAX_BIAS, MAX_PENALTY, MAX_REPETITION, MAX_TEMPERATURE, MIN_REPETITION
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams

MAX_LOGPROBS = 1024
MAX_SEED = 2**63


def check_request(
    request: GenerationRequest, *, vocab_size: int, max_model_len: int, can_end_thoughts: bool = True
) -> None:
    """can_end_thoughts: the tokenizer has a </think>.

    Raises: PromptTooLongError when prompt + max_tokens exceed `max_model_len`; InvalidRequestError otherwise.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequestError("the prompt is empty: at least one token is needed")
    _check_token_ids("prompt token id", prompt, vocab_size)
    _check_token_ids("stop token id", request.stop.token_ids, vocab_size)
    if "" in request.stop.strings:
        raise InvalidRequestError("stop holds an empty string, which every answer begins with")
    if sampling.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {sampling.max_tokens}, at least 1 is needed")
    if request.max_total_tokens > max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}: together "
            f"{request.max_total_tokens}, the limit is {max_model_len}"
        )
    if not 0 <= request.stop.min_tokens <= sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {request.stop.min_tokens}, expected 0 <= min_tokens <= max_tokens = {sampling.max_tokens}"
        )
    if request.deadline_s is not None and not request.deadline_s < math.inf:
        raise InvalidRequestError(f"deadline_s is {request.deadline_s}, expected a finite number of seconds")
    _check_choice(sampling)
    _check_edits(sampling, vocab_size)
    _check_thoughts(request, can_end_thoughts)


def _check_choice(sampling: SamplingParams) -> None:
    """Temperature, truncation, seed, counts of log-probabilities."""
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise InvalidRequestError(f"temperature is {sampling.temperature}, expected 0..{MAX_TEMPERATURE:g}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p is {sampling.top_p}, expected 0 < top_p <= 1")
    if sampling.top_k < 0:
        raise InvalidRequestError(f"top_k is {sampling.top_k}, expected >= 1, or 0 for all tokens")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequestError(f"min_p is {sampling.min_p}, expected 0 <= min_p <= 1")
    if not 0 <= sampling.seed < MAX_SEED:
        raise InvalidRequestError(f"seed is {sampling.seed}, expected 0 <= seed < 2**63")
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, field)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequestError(f"{field} is {value}, expected 0..{MAX_LOGPROBS}")


def _check_edits(sampling: SamplingParams, vocab_size: int) -> None:
    """Penalties and bias."""
    for field in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, field)
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise InvalidRequestError(f"{field} is {value}, expected -{MAX_PENALTY:g}..{MAX_PENALTY:g}")
    if not MIN_REPETITION <= sampling.repetition_penalty <= MAX_REPETITION:
        raise InvalidRequestError(
            f"repetition_penalty is {sampling.repetition_penalty}, expected {MIN_REPETITION:g}..{MAX_REPETITION:g}"
        )
    token_ids = [token_id for token_id, _ in sampling.logit_bias]
    _check_token_ids("logit_bias token id", token_ids, vocab_size)
    if len(set(token_ids)) != len(token_ids):
        raise InvalidRequestError(f"logit_bias has {len(token_ids)} entries for {len(set(token_ids))} token ids")
    for token_id, bias in sampling.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequestError(f"logit_bias of token {token_id} is {bias}, expected -{MAX_BIAS:g}..{MAX_BIAS:g}")


def _check_thoughts(request: GenerationRequest, can_end_thoughts: bool) -> None:
    if request.thinking_budget is None:
        return
    if request.thinking_budget < 0:
        raise InvalidRequestError(f"thinking_budget is {request.thinking_budget}, expected >= 0")
    if not request.thinking:
        raise InvalidRequestError("thinking_budget needs a request that starts inside the thoughts")
    if not can_end_thoughts:
        raise InvalidRequestError("thinking_budget needs a tokenizer with </think>, this checkpoint has none")


def _check_token_ids(what: str, token_ids: tuple[int, ...] | list[int], vocab_size: int) -> None:
    bad = next((t for t in token_ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(f"{what} {bad} is outside the vocabulary of {vocab_size}")
