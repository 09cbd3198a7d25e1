"""Timed pieces of work on one engine. Prompts are random token ids, so that nothing is found in a prefix cache.

Each function returns its samples; what they mean, and how many there are, is decided in `engine.py`.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.ids import new_request_id
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams, StopParams

_FIRST_WORD_ID = 3  # ids below are control tokens in every V4 vocabulary
_WARM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSample:
    """A timed block of decode steps."""

    seconds: float
    num_steps: int
    num_tokens: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A timed prompt."""

    seconds: float
    num_cached_tokens: int


def random_prompt(rng: random.Random, engine: EngineCore, num_tokens: int) -> tuple[int, ...]:
    """Token ids of plain text tokens."""
    return tuple(rng.randrange(_FIRST_WORD_ID, engine.config.vocab_size) for _ in range(num_tokens))


def time_first_token(engine: EngineCore, prompt: Sequence[int]) -> FirstToken:
    """From adding a request until its first token, with the engine otherwise idle."""
    request = _request(prompt, max_tokens=1)
    started = time.perf_counter()
    engine.add(request)
    while True:
        for chunk in engine.step().chunks:
            chunk.raise_if_failed()
            if chunk.token_ids:
                return FirstToken(seconds=time.perf_counter() - started, num_cached_tokens=chunk.num_cached_tokens)


def answer_tokens(
    *, batch_size: int, context: int, num_steps: int, num_drafts: int, max_num_batched_tokens: int
) -> int:
    """Tokens that a sequence of a decode measurement may generate: those timed, and those while others are prefilled.

    num_steps: timed ones. A prefill step is assumed to take at least half its budget of prompt tokens.
    """
    num_prefill_steps = batch_size + 2 * batch_size * context // max_num_batched_tokens
    return (num_prefill_steps + _WARM_STEPS + num_steps) * (1 + num_drafts) + 1


def time_decode(
    engine: EngineCore, prompts: Sequence[Sequence[int]], *, num_blocks: int, num_steps: int, max_tokens: int
) -> list[DecodeSample]:
    """Prefill all prompts, then time blocks of `num_steps` steps in which every sequence decodes.

    max_tokens: at least `answer_tokens` for these numbers.
    """
    requests = [_request(prompt, max_tokens=max_tokens) for prompt in prompts]
    try:
        for request in requests:
            engine.add(request)
        _prefill(engine, {request.request_id for request in requests})
        for _ in range(_WARM_STEPS):
            engine.step()
        return [_decode_block(engine, num_steps, len(prompts)) for _ in range(num_blocks)]
    finally:
        for request in requests:
            engine.abort(request.request_id)


def _prefill(engine: EngineCore, waiting: set[str]) -> None:
    while waiting:
        for chunk in engine.step().chunks:
            chunk.raise_if_failed()
            waiting.discard(chunk.request_id)


def _decode_block(engine: EngineCore, num_steps: int, batch_size: int) -> DecodeSample:
    num_tokens = num_drafted = num_accepted = 0
    started = time.perf_counter()
    for _ in range(num_steps):
        chunks = engine.step().chunks
        assert len(chunks) == batch_size, f"{len(chunks)} of {batch_size} sequences advanced: the pool is too small"
        for chunk in chunks:
            num_tokens += len(chunk.token_ids)
            num_drafted += chunk.num_drafted
            num_accepted += chunk.num_accepted
    seconds = time.perf_counter() - started
    return DecodeSample(
        seconds=seconds,
        num_steps=num_steps,
        num_tokens=num_tokens,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
    )


def _request(prompt: Sequence[int], *, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=new_request_id("bench"),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        stop=StopParams(ignore_eos=True),
    )
