"""A tool block as the model wrote it, rewritten as the block that deepseek-recipe reads (spec 8.5).

What it repairs: a missing wrapper, tags closed by the next tag or by the end, cut names, other bars, a missing or wrong
`string` attribute, JSON that not every reader takes (it becomes a string), one JSON object in place of parameters,
names that would break the JSON. So the arguments of a call always parse, unless the length limit cuts them. Text
parameters are passed on as they come; JSON ones when they are complete, because only then is it known that they parse.
"""

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import deepseek_recipe as recipe

from dsv4_cluster import strict_json
from dsv4_cluster.tokenizer.dsml_tags import Tag, TagKind, Unfinished, first_trigger, parse_tag

_MARK = recipe.SpecialToken.Dsml.default_str()
_OPENING, _CLOSING = f"<{_MARK}tool_calls>\n", f"</{_MARK}tool_calls>"
_BREAKS_JSON = re.compile(r'["\\<>\s\x00-\x1f\x7f]')
_BREAKS_NAME = re.compile(r'["\\<>\s\x00-\x1f\x7f]+')
Properties = Mapping[str, Any]  # parameter name -> JSON schema


class _Level(Enum):
    """Where in the block the text stands."""

    WRAPPER = "wrapper"
    INVOKE = "invoke"
    TEXT = "text"  # a value passed on as it comes
    HELD = "held"  # a value that has to be complete
    DONE = "done"


class ToolBlock:
    """One block, from its first invoke to its end."""

    def __init__(self, tools: Mapping[str, Properties], *, is_open: bool, max_calls: int | None) -> None:
        """tools: parameters of each function. is_open: the prompt holds the wrapper's tag. max_calls: None: any."""
        self._tools = tools
        self._is_open = is_open
        self._max_calls = max_calls
        self._level = _Level.WRAPPER
        self._properties: Properties = {}
        self._num_calls = 0
        self._has_parameters = False
        self._is_value_marked = True  # a value opened by a tag without a mark is closed by one
        self._held = ""  # of an invoke or of a value
        self._parameter = ""

    @property
    def is_done(self) -> bool:
        """The rest of the output is not part of the block."""
        return self._level is _Level.DONE

    def read(self, text: str, start: int, *, is_last: bool) -> tuple[str, int]:
        """Take what is certain of `text[start:]`. Returns: (rewritten text, where to go on)."""
        out = ""
        while start < len(text) and not self.is_done:
            trigger = first_trigger(text, start)
            if trigger != start:
                end = len(text) if trigger < 0 else trigger
                written, start = self._plain(text, start, end)
                out += written
                continue
            takes_unmarked = self._level in (_Level.WRAPPER, _Level.INVOKE) or not self._is_value_marked
            tag = parse_tag(text, start, is_last=is_last, takes_unmarked=takes_unmarked)
            if isinstance(tag, Unfinished):
                break
            if tag is None:
                written, start = self._plain(text, start, start + 1)
                out += written
            else:
                out += self._tag(tag)
                start = tag.end
        return out, start

    def finish(self) -> str:
        """The model ended its answer: close what is open."""
        return self._end_block()

    def _plain(self, text: str, start: int, end: int) -> tuple[str, int]:
        """Text between tags."""
        piece = text[start:end]
        if self._level is _Level.TEXT:
            return piece, end
        if self._level is not _Level.WRAPPER:
            self._held += piece
        elif self._num_calls and piece.strip():
            return self._end_block(), start + len(piece) - len(piece.lstrip())
        return "", end

    def _tag(self, tag: Tag) -> str:
        if tag.kind is TagKind.OTHER:
            return self._end_innermost() if tag.is_closing else self._end_value()
        if tag.kind is TagKind.WRAPPER:
            return self._end_block() if tag.is_closing and self._num_calls else self._end_value()
        if tag.kind is TagKind.INVOKE:
            return self._end_call() + ("" if tag.is_closing else self._start_call(tag))
        return self._end_value() + ("" if tag.is_closing else self._start_value(tag))

    def _end_innermost(self) -> str:
        return self._end_value() if self._level in (_Level.TEXT, _Level.HELD) else self._end_call()

    def _start_call(self, tag: Tag) -> str:
        name = _BREAKS_NAME.sub("", tag.name)
        if not name or self.is_done:
            return ""
        opening = "" if self._is_open else _OPENING
        self._is_open = True
        self._level, self._held, self._has_parameters = _Level.INVOKE, "", False
        self._num_calls += 1
        self._properties = self._tools.get(name, {})
        written = f'{opening}<{_MARK}invoke name="{name}">\n'
        return written + self._end_call() if tag.is_empty else written

    def _end_call(self) -> str:
        if self._level is _Level.WRAPPER or self.is_done:
            return ""
        written = self._end_value()
        if not self._has_parameters:
            written += self._object_parameters()
        self._level = _Level.WRAPPER
        written += f"</{_MARK}invoke>\n"
        return written + self._end_block() if self._num_calls == self._max_calls else written

    def _object_parameters(self) -> str:
        """One JSON object in place of the parameters."""
        value = _parsed(self._held.strip())
        if not isinstance(value, dict):
            return ""
        return "".join(_parameter(name, json.dumps(inner, ensure_ascii=False)) for name, inner in value.items())

    def _start_value(self, tag: Tag) -> str:
        if self._level is not _Level.INVOKE or not tag.name:
            return ""
        self._held, self._has_parameters = "", True
        self._parameter, self._is_value_marked = tag.name, tag.is_marked
        is_text = _is_text(tag.string, self._properties.get(tag.name))
        self._level = _Level.TEXT if is_text else _Level.HELD
        written = f'<{_MARK}parameter name="{_json_name(tag.name)}" string="true">' if is_text else ""
        return written + self._end_value() if tag.is_empty else written

    def _end_value(self) -> str:
        if self._level is _Level.TEXT:
            self._level = _Level.INVOKE
            return f"</{_MARK}parameter>\n"
        if self._level is not _Level.HELD:
            return ""
        self._level, value, self._held = _Level.INVOKE, self._held, ""
        if _parsed(value) is _NOT_JSON:
            value = json.dumps(value, ensure_ascii=False)
        return _parameter(self._parameter, value.strip())

    def _end_block(self) -> str:
        if self.is_done:
            return ""
        written = self._end_call()
        if self.is_done:
            return written
        self._level = _Level.DONE
        return written + _CLOSING if self._is_open else written


def parameters_by_tool(tools: Sequence[recipe.ToolDefinition]) -> dict[str, Properties]:
    """The properties of each tool's parameters; empty where the schema is of another kind."""
    return {tool.name: _properties(tool.parameters) for tool in tools}


def _properties(schema: Any) -> Properties:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _is_text(attribute: str | None, schema: Any) -> bool:
    """As the `string` attribute says; without a usable one, as the schema does. Otherwise the value itself decides."""
    said = (attribute or "").strip().lower()
    if said in ("true", "1", "yes"):
        return True
    return said not in ("false", "0", "no") and isinstance(schema, dict) and schema.get("type") == "string"


def _parameter(name: str, value: str) -> str:
    return f'<{_MARK}parameter name="{_json_name(name)}" string="false">{value}</{_MARK}parameter>\n'


def _json_name(name: str) -> str:
    """deepseek-recipe copies a parameter's name into the JSON as it stands."""
    return _BREAKS_JSON.sub(lambda match: f"\\u{ord(match.group()):04x}", name)


class _NotJson:
    """What is not JSON."""


_NOT_JSON = _NotJson()


def _parsed(text: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError:
        return _NOT_JSON
