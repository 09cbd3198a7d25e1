"""Compiled grammars: StructuredSpec + vocabulary -> parsers, with a cache for schemas that come again and again."""

import threading
from collections import OrderedDict

import llguidance

from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.structured import dsml, source
from dsv4_cluster.structured.dsml import BlockStart
from dsv4_cluster.structured.vocabulary import GrammarVocabulary

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 512 * 1024 * 1024
# llguidance does not tell what a parser holds, so it is estimated from its grammar's text, definitions repeated. Growth
# of the resident memory per parser over the real vocabulary: 60 to 90 KiB and 20 (enum) to 165 (3000 properties) bytes
# per byte of text. Patterns make states of a lexer, as many as the fuel of the first mask makes: up to 11 MiB.
_PARSER_BYTES = 96 * 1024
_BYTES_PER_TEXT_BYTE = 200
_PATTERN_BYTES = 12 * 1024 * 1024


class CompiledGrammar:
    """One constraint as parsers that are ready to be copied; the parts it needs are compiled when first asked for."""

    def __init__(self, spec: StructuredSpec, vocabulary: GrammarVocabulary) -> None:
        """Raises: InvalidRequestError."""
        self.spec = spec
        self.vocabulary = vocabulary
        self.is_tool_call = spec.kind in source.TOOL_KINDS
        self._tools = source.tools_of(spec) if self.is_tool_call else ()
        self._prototypes: dict[BlockStart, llguidance.LLMatcher] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0  # that the compiled parts hold, estimated

    def parser(self, start: BlockStart = BlockStart.NOTHING) -> llguidance.LLMatcher:
        """A fresh parser of the rest of the answer. start: for tool calls, how much of the block is already there.

        Raises: InvalidRequestError when the grammar is not valid, too complex or matches nothing.
        """
        with self._lock:
            if start not in self._prototypes:
                self._prototypes[start] = self._compile(start)
            return self._prototypes[start].deep_copy()

    def compile_all(self) -> None:
        """Compile what the answer may need, so that no step has to wait. Raises: InvalidRequestError."""
        if not self.is_tool_call:
            self.parser()
            return
        for start in BlockStart:
            self.parser(start)

    def _compile(self, start: BlockStart) -> llguidance.LLMatcher:
        if self.is_tool_call:
            mark = f"<[{self.vocabulary.dsml_token_id}]>"
            block = dsml.block_source(self._tools, start, mark, is_single_call=self.spec.is_single_call)
            text = llguidance.LLMatcher.grammar_from_lark(block)
        else:
            text = source.plain_source(self.spec)
        parser = llguidance.LLMatcher(self.vocabulary.lltokenizer, text, log_level=0, limits=source.LIMITS)
        parser.compute_bitmask()  # finds grammars that match nothing, and those whose first mask is too costly
        if parser.is_error():
            raise source.compile_error(self.spec, parser.get_error())
        if parser.is_stopped() and not parser.is_accepting():
            raise source.compile_error(self.spec, f"no text satisfies it ({parser.stop_reason()})")
        has_patterns = self.spec.kind in source.PATTERN_KINDS or '"pattern' in self.spec.schema
        self.num_bytes += _PARSER_BYTES + len(text) * _BYTES_PER_TEXT_BYTE + has_patterns * _PATTERN_BYTES
        return parser


class GrammarCache:
    """Compiled grammars of one vocabulary, the least recently used one dropped first. Safe on several threads.

    It holds at most MAX_CACHED_GRAMMARS and MAX_CACHED_BYTES; a grammar that is larger alone is not kept.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars: OrderedDict[StructuredSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """What the grammars hold, estimated."""
        with self._lock:
            return self._held()

    def find(self, spec: StructuredSpec) -> CompiledGrammar | None:
        """The compiled grammar, None where `get` would have to compile it."""
        with self._lock:
            grammar = self._grammars.get(spec)
            if grammar is not None:
                self._grammars.move_to_end(spec)
            return grammar

    def get(self, spec: StructuredSpec) -> CompiledGrammar:
        """Compile or find. A refused grammar is not kept. Raises: InvalidRequestError."""
        grammar = self.find(spec)
        if grammar is not None:
            return grammar
        grammar = CompiledGrammar(spec, self._vocabulary)
        grammar.compile_all()
        if grammar.num_bytes > MAX_CACHED_BYTES:
            return grammar
        with self._lock:
            self._grammars[spec] = grammar
            while len(self._grammars) > MAX_CACHED_GRAMMARS or self._held() > MAX_CACHED_BYTES:
                self._grammars.popitem(last=False)
        return grammar

    def _held(self) -> int:
        return sum(grammar.num_bytes for grammar in self._grammars.values())
