"""Vocabularies of both tokenizers, and random walks through a grammar: answers of a model that knows nothing."""

import functools
import random

import numpy as np

from dsv4_cluster.structured.grammar import CompiledGrammar
from dsv4_cluster.structured.matcher import Matcher
from dsv4_cluster.structured.vocabulary import GrammarVocabulary
from tests.kit.codec import load_codec

TOY_VOCAB_SIZE = 512
REAL_VOCAB_SIZE = 129280
EOS = 1
CLOSING = b'"}]>'


@functools.cache
def load_vocabulary(vocab_size: int = TOY_VOCAB_SIZE) -> GrammarVocabulary:
    """The grammar vocabulary of the cut-down or the real tokenizer."""
    return GrammarVocabulary(load_codec(vocab_size).text, vocab_size=vocab_size, eos_token_id=EOS)


def allowed_bits(matcher: Matcher, vocabulary: GrammarVocabulary) -> np.ndarray:
    """[num_words * 32] uint8, 1 = the mask admits the token; at least one."""
    packed = np.empty(vocabulary.num_words, dtype=np.int32)
    matcher.mask(packed)
    assert packed.any(), "the mask admits no token"
    return np.unpackbits(packed.view(np.uint8), bitorder="little")


def allowed_ids(matcher: Matcher, vocabulary: GrammarVocabulary) -> list[int]:
    """Token ids that the mask admits."""
    return np.flatnonzero(allowed_bits(matcher, vocabulary)).tolist()


@functools.cache
def closing_bits(vocab_size: int) -> np.ndarray:
    """[num_words * 32] uint8, 1 = EOS and tokens that begin like something which ends."""
    vocabulary = load_vocabulary(vocab_size)
    bits = np.zeros(vocabulary.num_words * 32, dtype=np.uint8)
    bits[[i for i in range(vocab_size) if i == EOS or vocabulary.token_bytes(i)[0] in CLOSING]] = 1
    return bits


def text_of(token_ids: list[int], vocabulary: GrammarVocabulary) -> str:
    """The answer's text without EOS."""
    return b"".join(vocabulary.token_bytes(i) for i in token_ids if i != EOS).decode()


def fresh_matcher(
    grammar: CompiledGrammar, *, thinking: bool = False, prompt_token_ids: tuple[int, ...] = ()
) -> Matcher:
    """A matcher in front of the first token."""
    return Matcher.of_answer(grammar, thinking=thinking, prompt_token_ids=prompt_token_ids)


def draw(matcher: Matcher, vocabulary: GrammarVocabulary, rng: random.Random, *, favour: float = 0.3) -> int:
    """A random allowed token; with probability `favour` one that closes, because blind draws hardly ever do."""
    bits = allowed_bits(matcher, vocabulary)
    closing = bits & closing_bits(vocabulary.vocab_size)
    ids = np.flatnonzero(closing if rng.random() < favour and closing.any() else bits)
    return int(ids[rng.randrange(len(ids))])


def walk(
    matcher: Matcher, vocabulary: GrammarVocabulary, rng: random.Random, *, max_tokens: int = 400
) -> list[int] | None:
    """Accept random allowed tokens up to EOS. Returns: the ids with EOS, None when max_tokens came first."""
    taken: list[int] = []
    while len(taken) < max_tokens:
        token_id = draw(matcher, vocabulary, rng)
        matcher.accept(token_id)
        taken.append(token_id)
        if token_id == EOS:
            return taken
    return None
