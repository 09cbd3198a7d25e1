"""StructuredSpec -> grammar text for llguidance, and the checks that need no vocabulary.

The front end calls `check_spec` before a request is queued; the engine compiles the same sources against its
vocabulary. Limits keep one request from spending the CPU of the others: sizes here, lexer and parser fuel in `LIMITS`.
"""

import itertools
import re

import llguidance

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.structured import dsml
from dsv4_cluster.structured.json_text import json_grammar, parse_json

MAX_SOURCE_BYTES = 256 * 1024  # of one schema, pattern, grammar or tool list
MAX_ERROR_CHARS = 400
# Fuel of the lexer and parser; the library's defaults allow seconds of work for one mask.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # 1-2 KB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
TOOL_KINDS = frozenset({"tool_call", "tool_call_required"})
PATTERN_KINDS = frozenset({"regex", "lark"})  # made of patterns; a schema may have some
_LABELS = {
    "json_object": "JSON object",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "tool_call": "tools",
    "tool_call_required": "tools",
}
# Comments, strings and patterns of a Lark grammar; a "<" outside of them names a special token.
_LARK_LITERAL = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')

_LISTING = re.compile(r"\s*\d+ \| ")
_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


def check_spec(spec: StructuredSpec) -> None:
    """Refuse a constraint that cannot be compiled. CPU-bound: below 1 ms for usual schemas.

    Raises: InvalidRequestError that says what is wrong with which kind of grammar.
    """
    if spec.kind not in TOOL_KINDS:
        _validate(plain_source(spec), _LABELS[spec.kind])
        return
    for tool in tools_of(spec):
        source = dsml.block_source((tool,), dsml.BlockStart.LINE, dsml.TEXT_MARK)
        _validate(source, f"parameters of tool {tool.name!r}")


def plain_source(spec: StructuredSpec) -> str:
    """The llguidance grammar of any kind but tool calls. Raises: InvalidRequestError."""
    text = _checked_size(spec)
    if spec.kind == "json_object":
        return json_grammar({"type": "object"})
    if spec.kind == "json_schema":
        return json_grammar(parse_json(text, "the JSON schema"))
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    assert spec.kind == "lark", spec.kind
    if "<" in _LARK_LITERAL.sub("", text):
        raise InvalidRequestError("the Lark grammar names a special token (<...>); an answer holds text only")
    return llguidance.LLMatcher.grammar_from_lark(text)


def tools_of(spec: StructuredSpec) -> tuple[dsml.Tool, ...]:
    """The tools of a tool-call constraint. Raises: InvalidRequestError."""
    return dsml.parse_tools(_checked_size(spec))


def compile_error(spec: StructuredSpec, reason: str) -> InvalidRequestError:
    """The error for a reason that llguidance gave."""
    return _not_enforceable(_LABELS[spec.kind], reason)


def _validate(source: str, label: str) -> None:
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)
    if is_error:
        raise _not_enforceable(label, messages[0])


def _not_enforceable(label: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the {label} cannot be enforced: {short_reason(reason)}")


def short_reason(reason: str) -> str:
    """What llguidance says is wrong, without its listing of the grammar and without a backtrace."""
    lines = itertools.takewhile(lambda line: not _LISTING.match(line), reason.strip().splitlines())
    text = _POSITION.sub("", " ".join(line.strip() for line in lines))
    return text.partition("<backtrace>")[0].strip()[:MAX_ERROR_CHARS]


def _checked_size(spec: StructuredSpec) -> str:
    if spec.kind not in _LABELS:
        raise InvalidRequestError(f"structured.kind is {spec.kind!r}, expected one of {', '.join(_LABELS)}")
    try:
        num_bytes = len(spec.schema.encode())
    except UnicodeEncodeError as err:
        raise InvalidRequestError(f"the {_LABELS[spec.kind]} is not valid Unicode text: {err.reason}") from err
    if num_bytes > MAX_SOURCE_BYTES:
        raise InvalidRequestError(f"the {_LABELS[spec.kind]} has {num_bytes} bytes, the limit is {MAX_SOURCE_BYTES}")
    if not spec.schema and spec.kind != "json_object":
        raise InvalidRequestError(f"the {_LABELS[spec.kind]} is empty")
    return spec.schema
