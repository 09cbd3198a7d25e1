"""Lark grammars of DSML tool blocks (spec 8.5).

    <M tool_calls>
    <M invoke name="get_weather">
    <M parameter name="city" string="true">Paris</M parameter>
    <M parameter name="n" string="false">3</M parameter>
    </M invoke>
    </M tool_calls>

M is the one special token that a block needs (written without the blank after it). A tool that is not strict gets
well-formed invokes: any parameter names, raw text or any JSON value. A strict tool gets its schema: its properties in
schema order, required ones always. Raw text ends at the closing tag, so it cannot hold the mark.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.schema_references import objects_in, references_in
from dsv4_cluster.structured.dsml_values import RAW_RULE, value_forms
from dsv4_cluster.structured.json_text import JsonValue, json_rule, parse_json
from dsv4_cluster.structured.schema_limits import num_pattern_properties
from dsv4_cluster.structured.vocabulary import DSML_MARK

MAX_TOOLS = 128
MAX_BLOCK_CHARS = 4 * 1024 * 1024  # definitions are repeated for each parameter that refers to them
MAX_PATTERN_PROPERTIES = 256  # over all parameters, likewise: 0.2 s of compiling; 6400 took 16 s
TEXT_MARK = json.dumps(DSML_MARK, ensure_ascii=False)  # stands for the token where a grammar is only checked
# The output parser cuts attributes at white space and copies names into JSON as they are.
_NAME_CHARS = r'[^"\\<>\s\x00-\x1f\x7f]'
_NAME = re.compile(_NAME_CHARS + "{1,256}")
_PARAMETER_NAME = f"/{_NAME_CHARS}{{1,128}}/"


class BlockStart(Enum):
    """How much of the opening line is already there."""

    NOTHING = "nothing"
    MARK = "<M"
    TAG = "<M tool_calls>"
    LINE = "<M tool_calls>\n"


@dataclass(frozen=True, slots=True)
class Tool:
    """One function of the request."""

    name: str
    parameters: dict[str, JsonValue]  # JSON schema of the arguments
    is_strict: bool

    @property
    def properties(self) -> dict[str, JsonValue] | None:
        """Schemas of the parameters; None when any parameter goes."""
        properties = self.parameters.get("properties")
        return properties if self.is_strict and isinstance(properties, dict) else None


def parse_tools(text: str) -> tuple[Tool, ...]:
    """Read a JSON array of chat-completions tools. Raises: InvalidRequestError that names the tool and the fault."""
    value = parse_json(text, "tools")
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("tools must be a non-empty array")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(value)} entries, at most {MAX_TOOLS} are taken")
    tools = tuple(_tool(entry, index) for index, entry in enumerate(value))
    names = [tool.name for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidRequestError(f"tools has two functions named {repeated!r}")
    num_patterns = sum(map(_num_pattern_properties, tools))
    if num_patterns > MAX_PATTERN_PROPERTIES:
        raise InvalidRequestError(
            f"the parameters of strict tools, with the definitions they refer to, have {num_patterns} names in "
            f"patternProperties, at most {MAX_PATTERN_PROPERTIES} can be enforced"
        )
    return tools


def block_source(tools: tuple[Tool, ...], start: BlockStart, mark: str, *, is_single_call: bool = False) -> str:
    """The Lark grammar of the rest of a tool block. mark: the DSML mark in Lark, such as `<[128825]>`.

    is_single_call: the block closes after one call.
    """
    further = "" if is_single_call else r'("\n" invoke)* '
    opening = {
        BlockStart.NOTHING: rf'"\n\n<" {mark} "tool_calls>\n"',
        BlockStart.MARK: r'"tool_calls>\n"',
        BlockStart.TAG: r'"\n"',
        BlockStart.LINE: "",
    }[start]
    rules = [
        # The lexer is greedy: "\n</" as one string would swallow the "\n<" of a further invoke.
        rf'start: {opening} invoke {further}"\n" "</" {mark} "tool_calls>"',
        "invoke: " + " | ".join(f"tool_{index}" for index in range(len(tools))),
        RAW_RULE,
    ]
    for index, tool in enumerate(tools):
        rules += _tool_rules(tool, f"tool_{index}", mark)
    if any(tool.properties is None for tool in tools):
        rules += _free_parameters(mark)
    return "\n".join(rules)


def _tool(entry: JsonValue, index: int) -> Tool:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"tools[{index}] is not a function with a name")
    name = str(function["name"])
    if not _is_name(name):
        raise InvalidRequestError(f"tools[{index}].function.name is {name[:80]!r}: not usable in a tool call")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise InvalidRequestError(f"tools[{index}].function.parameters must be an object")
    tool = Tool(name, parameters, function.get("strict") is True)
    bad = next((parameter for parameter in tool.properties or () if not _is_name(parameter)), None)
    if bad is not None:
        raise InvalidRequestError(f"tool {name!r}: parameter name {bad[:80]!r} is not usable in a tool call")
    return tool


def _num_pattern_properties(tool: Tool) -> int:
    """What the grammar compares, at most: a parameter with a reference brings what the tool's schema has."""
    everything = num_pattern_properties(objects_in(tool.parameters))
    if not everything or tool.properties is None:
        return 0
    refers = {name: bool(references_in(objects_in(schema))) for name, schema in tool.properties.items()}
    return sum(
        everything if refers[name] else num_pattern_properties(objects_in(schema))
        for name, schema in tool.properties.items()
    )


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and DSML_MARK not in text


def _tool_rules(tool: Tool, rule: str, mark: str) -> list[str]:
    line = _literal(f'invoke name="{tool.name}">\n')
    if tool.properties is None:
        return [f'{rule}: "<" {mark} {line} free_parameter* "</" {mark} "invoke>"']
    required = tool.parameters.get("required")
    required_names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    rules, parts, num_chars = [], [], 0
    for index, (name, schema) in enumerate(tool.properties.items()):
        parts.append(f"{rule}_p{index}" + ("" if name in required_names else "?"))
        rules.append(f"{rule}_p{index}: {_parameter(name, schema, tool, mark)}")
        num_chars += len(rules[-1])
        if num_chars > MAX_BLOCK_CHARS:
            raise InvalidRequestError(
                f"tool {tool.name!r}: parameters with the definitions they refer to have {num_chars} characters or "
                f"more, the limit is {MAX_BLOCK_CHARS}"
            )
    return [f'{rule}: "<" {mark} {line} {" ".join(parts)} "</" {mark} "invoke>"', *rules]


def _parameter(name: str, schema: JsonValue, tool: Tool, mark: str) -> str:
    """Alternatives of one whole parameter line."""
    forms = value_forms(schema, tool.parameters)
    head = f'parameter name="{name}" string='
    raw = [f'"<" {mark} {_literal(head + chr(34) + "true" + chr(34) + ">")} {form}' for form in forms.raw]
    quoted = [f'"<" {mark} {_literal(head + chr(34) + "false" + chr(34) + ">")} {form} "</"' for form in forms.json]
    return " | ".join(rf'{form} {mark} "parameter>\n"' for form in [*raw, *quoted])


def _free_parameters(mark: str) -> list[str]:
    head = r'"parameter name=\"" PARAMETER_NAME'
    return [
        "free_parameter: free_raw | free_json",
        rf'free_raw: "<" {mark} {head} "\" string=\"true\">" RAW {mark} "parameter>\n"',
        rf'free_json: "<" {mark} {head} "\" string=\"false\">" any_json "</" {mark} "parameter>\n"',
        f"PARAMETER_NAME: {_PARAMETER_NAME}",
        f"any_json: {json_rule({})}",
    ]


def _literal(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)
