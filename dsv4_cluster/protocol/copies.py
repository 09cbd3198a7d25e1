"""Several answers to one prompt: n requests that differ in their id and their seed, the first of which also reports
the prompt's log-probabilities.

The first copy is the request itself, seed included, so that raising n adds answers and changes none. The others draw
from seeds mixed from (seed, index): with seed + index, answer 1 of seed 7 would be answer 0 of seed 8.
"""

import dataclasses

from dsv4_cluster.protocol.request import GenerationRequest

MAX_COPIES = 128  # OpenAI's limit of n
MIN_SHARED_TOKENS = 128  # the cache shares prefixes in multiples of this; below it copies have nothing to wait for
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def copies(request: GenerationRequest, num_copies: int) -> tuple[GenerationRequest, ...]:
    """`num_copies` requests for the same prompt, `request` first."""
    others = (_copy(request, index) for index in range(1, num_copies))
    return (request, *others)


def copy_seed(seed: int, index: int) -> int:
    """Seed of copy `index` of a request; 0 <= seed < 2**63, as is the result. Index 0 keeps the seed.

    Source: splitmix64 (Steele, Lea, Flood 2014), output `index` of the generator started at `seed`.
    """
    if index == 0:
        return seed
    x = (seed + index * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


def can_share(request: GenerationRequest) -> bool:
    """True when copies gain by starting after the first one has computed the prompt: its pages are there then."""
    return len(request.prompt_token_ids) >= MIN_SHARED_TOKENS


def _copy(request: GenerationRequest, index: int) -> GenerationRequest:
    seed = copy_seed(request.sampling.seed, index)
    return dataclasses.replace(
        request,
        request_id=f"{request.request_id}-copy{index}",
        sampling=dataclasses.replace(request.sampling, seed=seed, prompt_logprobs=None),
    )
