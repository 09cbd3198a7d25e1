"""Checks on a request before the engine accepts it, each naming the field, the value and the limit."""

from dsv4_cluster.errors import InvalidRequestError, PromptTooLongError
from dsv4_cluster.protocol.request import GenerationRequest

MAX_LOGPROBS = 1024
MAX_SEED = 2**63


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raises: PromptTooLongError when prompt + max_tokens exceed `max_model_len`; InvalidRequestError otherwise."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        raise InvalidRequestError("the prompt is empty: at least one token is needed")
    out_of_range = next((t for t in prompt if not 0 <= t < vocab_size), None)
    if out_of_range is not None:
        raise InvalidRequestError(f"prompt token id {out_of_range} is outside the vocabulary of {vocab_size}")
    bad_stop = next((t for t in request.stop.token_ids if not 0 <= t < vocab_size), None)
    if bad_stop is not None:
        raise InvalidRequestError(f"stop token id {bad_stop} is outside the vocabulary of {vocab_size}")
    if sampling.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {sampling.max_tokens}, at least 1 is needed")
    if request.max_total_tokens > max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}: together "
            f"{request.max_total_tokens}, the limit is {max_model_len}"
        )
    if not 0 <= sampling.temperature < float("inf"):
        raise InvalidRequestError(f"temperature is {sampling.temperature}, expected a finite number >= 0")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p is {sampling.top_p}, expected 0 < top_p <= 1")
    if not 0 <= sampling.seed < MAX_SEED:
        raise InvalidRequestError(f"seed is {sampling.seed}, expected 0 <= seed < 2**63")
    if request.stop.min_tokens < 0:
        raise InvalidRequestError(f"min_tokens is {request.stop.min_tokens}, expected >= 0")
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, field)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise InvalidRequestError(f"{field} is {value}, expected 0..{MAX_LOGPROBS}")
