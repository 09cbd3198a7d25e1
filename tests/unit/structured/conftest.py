"""Grammars over both vocabularies."""

import random
from collections.abc import Callable

import pytest

from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.structured.grammar import CompiledGrammar
from tests.kit.grammar_walk import REAL_VOCAB_SIZE, TOY_VOCAB_SIZE, load_vocabulary


@pytest.fixture(params=[TOY_VOCAB_SIZE, REAL_VOCAB_SIZE], ids=["toy", "real"])
def vocab_size(request) -> int:
    return request.param


@pytest.fixture
def rng(request) -> random.Random:
    return random.Random(request.node.nodeid)


@pytest.fixture
def compile_grammar(vocab_size) -> Callable[..., CompiledGrammar]:
    """compile_grammar(kind, schema): compiled against the test's vocabulary."""

    def compile_spec(kind: str, schema: str = "", **fields) -> CompiledGrammar:
        return CompiledGrammar(StructuredSpec(kind=kind, schema=schema, **fields), load_vocabulary(vocab_size))

    return compile_spec
