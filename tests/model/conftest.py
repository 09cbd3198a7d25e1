"""The toy checkpoint, our model of it and the oracle: each built once per session."""

from collections.abc import Callable
from functools import cache

import pytest

from dsv4_cluster.model.transformer import Transformer
from dsv4_cluster.weights.reader import Checkpoint
from tests.kit.model_harness import Harness, load_model
from tests.kit.oracle import clear_prompt, load_oracle

Tokens = Callable[..., list[int]]


@pytest.fixture(scope="session")
def toy(toy_dir) -> Checkpoint:
    return Checkpoint.open(toy_dir)


@pytest.fixture(scope="session")
def toy_model(toy) -> Transformer:
    return load_model(toy)


@pytest.fixture(scope="session")
def toy_oracle(toy_dir):
    return load_oracle(toy_dir)


@pytest.fixture
def harness(toy, toy_model) -> Harness:
    return Harness(toy_model, toy.config)


@pytest.fixture(scope="session")
def tokens(toy, toy_oracle) -> Tokens:
    """tokens(n, seed) -> n random token ids for which every selection is clear, so that rounding cannot flip one."""

    @cache
    def draw(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(clear_prompt(toy_oracle, num_tokens, seed=seed, vocab_size=toy.config.vocab_size))

    return lambda num_tokens, seed=0: list(draw(num_tokens, seed))
