"""Constraints that cannot be kept are refused with a reason, without a vocabulary and without torch."""

import json
import multiprocessing
import subprocess
import sys

import pytest

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.structured.dsml_values import value_forms
from dsv4_cluster.structured.source import MAX_SOURCE_BYTES, check_spec


def _tool(name="f", **parameters):
    parameters = {"type": "object", **parameters}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


def _tools(*tools) -> str:
    return json.dumps(tools)


PATTERNS = {"type": "object", "patternProperties": {f"^k{i}[a-z]*$": {"const": i} for i in range(13)}}
REFERRING = {f"p{i}": {"$ref": "#/$defs/A"} for i in range(10)}


def _pattern_properties(*counts: int) -> str:
    objects = ({f"^k{i}[a-z]*$": {"const": i} for i in range(count)} for count in counts)
    return json.dumps({"anyOf": [{"type": "object", "patternProperties": names} for names in objects]})


@pytest.mark.parametrize(
    ("kind", "schema", "words"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[" * 50_000, "nested too deeply"),
        ("json_schema", '{"type":"array","items":' * 3000 + "{}" + "}" * 3000, "nested too deeply"),
        ("json_schema", "3", "an object or a boolean"),
        ("json_schema", "", "is empty"),
        ("json_schema", '{"type": "number", "minimum": 3, "maximum": 1}', "minimum"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "integer", "minimum": 1e999}', "1e999 is too large"),
        ("json_schema", '{"$ref": "https://example.com/a.json"}', "example.com"),
        ("json_schema", _pattern_properties(33, 32), "65 names in patternProperties, at most 64"),
        ("tool_call", _tools(_tool(properties={"a": json.loads(_pattern_properties(65))})), "at most 64"),
        (
            "tool_call",
            _tools(*(_tool(name, properties=REFERRING, **{"$defs": {"A": PATTERNS}}) for name in "fg")),
            "have 260 names in patternProperties, at most 256",
        ),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a" * (MAX_SOURCE_BYTES + 1), str(MAX_SOURCE_BYTES)),
        ("regex", "\ud800", "not valid Unicode"),
        ("lark", "start: rest", "rest"),
        ("lark", "start: <think>", "special token"),
        ("lark", 'start: "a" <[1]>', "special token"),
        ("tool_call", "[]", "non-empty array"),
        ("tool_call", '[{"type": "function"}]', "tools[0]"),
        ("tool_call", _tools(_tool("a b")), "'a b'"),
        ("tool_call", _tools(_tool("f"), _tool("f")), "two functions named 'f'"),
        ("tool_call", _tools(*(_tool(f"f{i}") for i in range(200))), "at most 128"),
        ("tool_call", _tools(_tool(properties={"a b": {}})), "'a b'"),
        ("tool_call", _tools(_tool(properties={"a": {"type": "text"}})), "tool 'f'"),
        ("tool_call", _tools(_tool(properties={"a": {"$ref": "#/$defs/A"}})), "#/$defs/A"),
        (
            "tool_call",
            _tools(_tool(properties={"a": {"$ref": "#/$defs/A"}}, **{"$defs": {"A": {"$ref": "#/$defs/A"}}})),
            "circles",
        ),
        ("tool_call", _tools(_tool(properties={"a": {"type": "string", "minLength": "2"}})), "minLength"),
        ("sonnet", "abab", "structured.kind"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_impossible_constraint_is_refused_with_its_reason(kind, schema, words):
    with pytest.raises(InvalidRequestError) as refusal:
        check_spec(StructuredSpec(kind=kind, schema=schema))

    assert words in refusal.value.message
    assert len(refusal.value.message) < 600


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("json_object", ""),
        ("json_schema", "true"),
        ("json_schema", _pattern_properties(64)),
        ("json_schema", '{"type": "string", "x-guidance": {"lenient": true}}'),
        ("regex", r"</?[a-z]+>"),
        ("lark", 'start: "<" /<b>/ # not a token: <think>\n'),
        ("tool_call", _tools({"type": "function", "function": {"name": "f"}})),
        ("tool_call_required", _tools(_tool(properties={"MARK": {"type": "integer"}}))),
    ],
)
def test_a_constraint_that_can_be_kept_passes(kind, schema):
    check_spec(StructuredSpec(kind=kind, schema=schema))


@pytest.mark.parametrize(
    ("schema", "num_raw", "has_json"),
    [
        ({"type": "string"}, 1, False),
        ({"type": "string", "maxLength": 3}, 1, False),
        ({"enum": ["a", "b"]}, 2, False),
        ({"const": "a"}, 1, False),
        ({"type": "string", "pattern": "a+"}, 0, True),
        ({"type": "integer"}, 0, True),
        ({"enum": ["a", 1]}, 0, True),
        ({"type": ["string", "null"]}, 1, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 1, True),
        ({"$ref": "#/$defs/Name"}, 1, False),
        ({"description": "anything"}, 1, True),
        (True, 1, True),
    ],
    ids=str,
)
def test_strings_go_raw_and_everything_else_as_json(schema, num_raw, has_json):
    forms = value_forms(schema, {"$defs": {"Name": {"type": "string"}}})

    assert (len(forms.raw), bool(forms.json)) == (num_raw, has_json)


LOWEST = -(2**63)
EDGES = [-(10**300), -1e308, 2 * LOWEST, LOWEST - 1, LOWEST, LOWEST + 1, LOWEST + 1024, -(2**53) - 1]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _checks_of_edges() -> None:
    """In a process of its own: what is checked here has ended processes."""
    for value in (*EDGES, 10**300):
        is_high = value > 0
        schemas = [{"enum": [1, value]}, {"const": [{"a": value}]}, {"anyOf": [{"const": value}]}]
        schemas += [] if is_high else [{key: value} for key in BOUNDS]
        schemas += [] if is_high else [{"minimum": value, "maximum": other} for other in EDGES]
        for inner in (*schemas, *({"type": "integer", **schema} for schema in schemas)):
            parameters = {"type": "object", "properties": {"n": inner}}
            for spec in (
                StructuredSpec(kind="json_schema", schema=json.dumps(parameters)),
                StructuredSpec(kind="tool_call", schema=_tools(_tool(**parameters))),
            ):
                try:
                    check_spec(spec)
                except InvalidRequestError as err:
                    assert "beyond 2**53" in err.message, (inner, err.message)
                else:
                    raise AssertionError(f"{inner} passes")


def test_numbers_that_would_end_the_process_are_refused():
    run = multiprocessing.get_context("spawn").Process(target=_checks_of_edges)
    run.start()
    run.join(60)

    assert run.exitcode == 0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**64},
        {"type": "integer", "enum": [2**53, -(2**53)]},
        {"type": "object", "properties": {"const": {"type": "string"}, "minimum": {"default": -(2**70)}}},
        {"type": "string", "examples": [2**70], "default": -1e300},
    ],
)
def test_numbers_that_are_exact_or_no_constraint_pass(schema):
    check_spec(StructuredSpec(kind="json_schema", schema=json.dumps(schema)))


def _chain(num: int, wrap) -> dict:
    links = {f"a{i}": wrap({"$ref": f"#/$defs/a{i + 1}"}) for i in range(num)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{num}": {"type": "string"}}}


LOW_RANGE = {"type": "integer", "minimum": LOWEST, "maximum": LOWEST}
CIRCLE = {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "string"}]}}
DOUBLING = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {"type": "string"}}
PATTERNS = [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 60)]
HARMFUL = [
    ("json_schema", json.dumps(_chain(3000, lambda link: link)), "at most 1000 are followed"),
    ("json_schema", json.dumps(_chain(1500, lambda link: {"type": "array", "items": link})), "at most 1000"),
    ("json_schema", json.dumps({"$ref": "#/x/default", "x": {"default": LOW_RANGE}}), "beyond 2**53"),
    ("json_schema", json.dumps({"$ref": "#/x/minimum", "x": {"minimum": LOW_RANGE}}), "beyond 2**53"),
    ("json_schema", json.dumps({"allOf": PATTERNS}), "joins 59 patterns"),
    ("json_schema", json.dumps({"allOf": [{"properties": {"a": one}} for one in PATTERNS]}), "joins 59 patterns"),
    (
        "json_schema",
        json.dumps(
            {"allOf": [{"$ref": f"#/$defs/p{i}"} for i in range(59)]}
            | {"$defs": {f"p{i}": one for i, one in enumerate(PATTERNS)}}
        ),
        "joins 59 patterns",
    ),
    ("tool_call", _tools(_tool(properties={"a": {"$ref": "#/$defs/A"}}, **{"$defs": CIRCLE})), "or in circles"),
    ("tool_call", _tools(_tool(properties={"a": {"$ref": "#/$defs/a0"}}, **{"$defs": DOUBLING})), "1000 schemas"),
    (
        "tool_call",
        _tools(
            _tool(
                properties={f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/A"}} for i in range(1000)},
                **{"$defs": {"A": {"type": "integer", "description": "x" * 100_000}}},
            )
        ),
        "the limit is 4194304",
    ),
]


def _checks_of_harmful_schemas() -> None:
    """In a process of its own: each of these ended it, or did not end."""
    for kind, schema, words in HARMFUL:
        try:
            check_spec(StructuredSpec(kind=kind, schema=schema))
        except InvalidRequestError as err:
            assert words in err.message, (schema[:80], err.message)
        else:
            raise AssertionError(f"{schema[:80]} passes")


def test_schemas_that_would_end_the_process_or_hold_it_are_refused():
    run = multiprocessing.get_context("spawn").Process(target=_checks_of_harmful_schemas, daemon=True)
    run.start()
    run.join(30)
    run.kill()
    run.join()

    assert run.exitcode == 0


@pytest.mark.parametrize(
    "schema",
    [
        _chain(200, lambda link: {"anyOf": [link, {"type": "null"}]}),
        {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, 3)] + [{"type": "string"}]},
        {"type": "object", "properties": {f"p{i}": one for i, one in enumerate(PATTERNS)}, "allOf": [{}]},
        {
            "$ref": "#/$defs/Node",
            "$defs": {
                "Named": {"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}}},
                "Node": {
                    "allOf": [
                        {"$ref": "#/$defs/Named"},
                        {"properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}},
                    ]
                },
            },
        },
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_usual_references_and_patterns_pass(schema):
    check_spec(StructuredSpec(kind="json_schema", schema=json.dumps(schema)))


def test_checking_needs_no_torch():
    code = (
        "import sys; from dsv4_cluster.structured.source import check_spec;"
        "from dsv4_cluster.protocol.request import StructuredSpec;"
        "check_spec(StructuredSpec(kind='regex', schema='a')); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
