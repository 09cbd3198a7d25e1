"""The cache of compiled grammars is bounded by their number and by their bytes, the least recently used go first."""

import json

import pytest

from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.structured import grammar as grammars
from dsv4_cluster.structured.grammar import CompiledGrammar, GrammarCache
from tests.kit.grammar_walk import load_vocabulary


def schema_of(name: str, num_properties: int = 50) -> StructuredSpec:
    properties = {f"{name}{i}": {"type": "integer"} for i in range(num_properties)}
    return StructuredSpec(kind="json_schema", schema=json.dumps({"type": "object", "properties": properties}))


@pytest.fixture
def cache() -> GrammarCache:
    return GrammarCache(load_vocabulary())


def bytes_of(spec: StructuredSpec) -> int:
    grammar = CompiledGrammar(spec, load_vocabulary())
    grammar.compile_all()
    return grammar.num_bytes


def test_bytes_bound_the_cache_and_the_least_recently_used_grammar_goes_first(cache, monkeypatch):
    specs = [schema_of(name) for name in "abcd"]
    monkeypatch.setattr(grammars, "MAX_CACHED_BYTES", 3 * bytes_of(specs[0]))
    first, second, _ = (cache.get(spec) for spec in specs[:3])

    assert cache.get(specs[0]) is first
    cache.get(specs[3])

    assert cache.find(specs[1]) is None and cache.find(specs[0]) is first
    assert cache.get(specs[1]) is not second
    assert cache.num_bytes == 3 * bytes_of(specs[0])


def test_a_grammar_beyond_the_bytes_is_not_kept_and_drops_no_other(cache, monkeypatch):
    small, large = schema_of("a", 5), schema_of("b", 200)
    monkeypatch.setattr(grammars, "MAX_CACHED_BYTES", bytes_of(large) - 1)
    kept = cache.get(small)

    assert cache.get(large).num_bytes > grammars.MAX_CACHED_BYTES

    assert cache.find(large) is None and cache.find(small) is kept


def test_the_number_of_grammars_is_bounded(cache):
    specs = [StructuredSpec(kind="json_schema", schema=json.dumps({"const": i})) for i in range(70)]

    for spec in specs:
        cache.get(spec)

    assert [cache.find(spec) is None for spec in specs] == [True] * 6 + [False] * grammars.MAX_CACHED_GRAMMARS


def test_every_part_and_its_patterns_count(cache):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    parts = bytes_of(StructuredSpec(kind="tool_call", schema=json.dumps([tool])))

    assert parts > 3 * bytes_of(StructuredSpec(kind="json_schema", schema="{}"))
    assert bytes_of(StructuredSpec(kind="regex", schema="a*")) > 11 * 2**20
