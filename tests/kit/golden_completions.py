"""Golden completions: what a model emits, and the message a client must get for it.

The systematic ones are composed of parts, and their messages of the same parts; nothing here asks the parser. The
hand-written ones are `tests/data/golden_completions.jsonl`: one object per line with the fields of `Golden`.
"""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_cluster.protocol.output import FinishReason

MARK = "｜DSML｜"
_FILE = Path(__file__).parent.parent / "data" / "golden_completions.jsonl"
_STRING, _ARRAY = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_RUN = {"type": "object", "properties": {"cmd": _STRING, "n": {"type": "integer"}, "args": _ARRAY}}
TOOLS = [
    {"type": "function", "function": {"name": "run", "description": "Runs a command.", "parameters": _RUN}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One completion. calls: [name, arguments as JSON values]; whole_calls is false where the length cut the last."""

    name: str
    output: str
    content: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)
    finish: str = "stop"
    thinks: bool = True
    has_tools: bool = True
    ends_by: FinishReason = FinishReason.STOP
    open_call: list[str] | None = None  # [name, arguments as text] of a call that the length limit cut
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def request_fields(self) -> dict[str, Any]:
        """Body fields of the request."""
        tools = {"tools": TOOLS} if self.has_tools else {}
        return {"thinking": {"type": "enabled" if self.thinks else "disabled"}, **tools, **self.fields}


_THOUGHTS = {
    "plain": "The user wants a list.",
    "unicode": "Überlegen: 世界 – é🎉 ﷽",
    "look-alikes": "if a < b and c<d, then 2>&1; <div> <| ｜ <User",
    "lines": "First.\n\nSecond:\n- a <\n- b",
    "tags": "I could write <think> or <tool_calls> here.",
}
_TEXTS = {
    "plain": "Here you are.",
    "unicode": "Grüße, 世界 🎉👩‍👩‍👧!",
    "compare": "1 < 2 and 3>2, a<b, x <= y << z",
    "shell": "cat <<EOF >out 2>&1\n<in\nEOF",
    "html": '<div class="a"><invoke name="x">b</invoke></div>\n<!-- c -->',
    "bars": "a <| b |> c || d ｜ e <｜ f <｜User g |DSML| <DSML> DSML",
    "code": "```xml\n<parameter name='p'>1</parameter>\n```",
    "json": '{"a": [1, "<｜x", null]}',
    "end": "and then 1 <",
}
_BLOCK = (
    f'<{MARK}tool_calls>\n<{MARK}invoke name="run">\n'
    f'<{MARK}parameter name="cmd" string="true">ls -l</{MARK}parameter>\n'
    f'<{MARK}parameter name="n" string="false">3</{MARK}parameter>\n</{MARK}invoke>\n</{MARK}tool_calls>'
)
_CALL = ["run", {"cmd": "ls -l", "n": 3}]
_BLOCKS = {
    "proper": _BLOCK,
    "ascii bars": _BLOCK.replace("｜", "|"),
    "ascii closing bars": _BLOCK.replace(f"</{MARK}", "</|DSML|"),
    "mixed bars": _BLOCK.replace("DSML｜", "DSML|"),
    "doubled bars": _BLOCK.replace("｜", "｜｜"),
    "no left bar": _BLOCK.replace("<｜", "<"),
    "no right bar": _BLOCK.replace("DSML｜", "DSML"),
    "blanks": _BLOCK.replace("<｜DSML｜", "< ｜DSML｜ "),
    "no bracket": _BLOCK.replace(f"<{MARK}tool_calls>\n<{MARK}invoke", f"{MARK}tool_calls>\n{MARK}invoke"),
    "no bracket, mixed bars": _BLOCK.replace(f"<{MARK}tool_calls>\n<{MARK}in", "｜DSML|tool_calls>\n｜DSML|in"),
    "no bracket, no right bar": _BLOCK.replace(f"<{MARK}tool_calls>\n<{MARK}in", "｜DSMLtool_calls>\n｜DSMLin"),
    "no wrapper": _BLOCK.replace(f"<{MARK}tool_calls>\n", "").replace(f"\n</{MARK}tool_calls>", ""),
    "no wrapper opener": _BLOCK.replace(f"<{MARK}tool_calls>\n", ""),
    "no wrapper end": _BLOCK.replace(f"\n</{MARK}tool_calls>", ""),
    "no invoke end": _BLOCK.replace(f"\n</{MARK}invoke>", ""),
    "no parameter ends": _BLOCK.replace(f"</{MARK}parameter>\n", ""),
    "cut names": _BLOCK.replace(f"</{MARK}parameter>", f"</{MARK}para>"),
    "cut closing tags": _BLOCK.replace(f"</{MARK}parameter>", f"</{MARK}parameter"),
    "nameless closing tags": _BLOCK.replace(f"</{MARK}parameter>", f"</{MARK}>"),
    "slash behind the mark": _BLOCK.replace(f"</{MARK}", f"<{MARK}/"),
    "cut at the end": _BLOCK.removesuffix(f"parameter>\n</{MARK}invoke>\n</{MARK}tool_calls>"),
    "cut in a bracket": _BLOCK.removesuffix("tool_calls>"),
    "no string attribute": _BLOCK.replace(' string="true"', "").replace(' string="false"', ""),
    "wrong string attribute": _BLOCK.replace('string="true"', 'string="str"'),
    "unquoted attributes": _BLOCK.replace('"', ""),
    "other name attribute": _BLOCK.replace("invoke name=", "invoke tool="),
    "other wrapper name": _BLOCK.replace("tool_calls", "function_calls"),
    "unmarked invoke": _BLOCK.replace(f"<{MARK}invoke", "<invoke").replace(f"</{MARK}invoke", "</invoke"),
    "object": _BLOCK.partition(f"<{MARK}parameter")[0]
    + f'{{"cmd": "ls -l", "n": 3}}\n</{MARK}invoke>\n</{MARK}tool_calls>',
    "text behind": _BLOCK + "\n\nI hope this helps </think> <｜DSML｜tool_calls>",
    "second block": f"{_BLOCK}\n\n{_BLOCK}",
    "wrapper twice": f"<{MARK}tool_calls>\n{_BLOCK}",
}
_VALUES = {
    "empty": "",
    "blank": " \n ",
    "shell": 'grep -c "a<b" <in >out 2>&1 | wc',
    "trailing bracket": "echo 1 <",
    "trailing closer": "echo </",
    "html": '<div>\n  <p name="a" string="true">b</p>\n</div>',
    "unmarked tags": "</parameter>\n</invoke>\n</tool_calls>",
    "thought tags": "<think>a</think>b",
    "bars": "a ｜ b <｜ c <| d |DSML| e <｜User｜>",
    "escapes": 'say "hi" \\n \\u0041 \t end\\',
    "unicode": "世界 🎉 é \u2028 \u200d ﷽",
    "long": "line of text\n" * 12,
    "number": "3",
    "json": '{"a": "b"}',
}
_JSON = [
    "3",
    "-1.5e3",
    "true",
    "null",
    '"text"',
    '["a <b>", "c"]',
    '{"a": {"b": [1, "｜"]}}',
    " [1,\n 2] ",
    '"世界 🎉"',
]
_NO_JSON = [
    "",
    "three",
    "{'a': 1}",
    '{"a": 1',
    "[1, 2",
    "NaN",
    "True",
    '"cut',
    "1 < 2",
    "1e999",
    "[-1e400]",
    '"\\ud800"',
]


@functools.cache
def golden_completions() -> tuple[Golden, ...]:
    """All of them; names are unique."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    written = [Golden(**{**json.loads(line), "name": f"written {number}"}) for number, line in enumerate(lines, 1)]
    return (*_plain_texts(), *_tool_blocks(), *_arguments(), *written)


def _plain_texts() -> list[Golden]:
    found = []
    for has_tools in (True, False):
        where = "tools" if has_tools else "no tools"
        for name, text in _TEXTS.items():
            chat = Golden(name=f"text {name}, {where}", output=text, content=text, thinks=False, has_tools=has_tools)
            found.append(chat)
        for (name, thoughts), text in zip(_THOUGHTS.items(), _TEXTS.values(), strict=False):
            output = f"{thoughts}</think>{text}"
            found.append(Golden(name=f"thoughts {name}, {where}", output=output, reasoning=thoughts, content=text))
        for name, thoughts in _THOUGHTS.items():
            found.append(
                Golden(name=f"only thoughts {name}, {where}", output=thoughts, reasoning=thoughts, has_tools=has_tools)
            )
    return found


def _tool_blocks() -> list[Golden]:
    found = []
    for name, block in _BLOCKS.items():
        calls, finish = [_CALL], "tool_calls"
        found += [
            Golden(name=f"{name}, chat", output=f"\n\n{block}", calls=calls, finish=finish, thinks=False),
            Golden(
                name=f"{name}, behind text",
                output=f"Hm 1 < 2.</think>So I run it <now>.\n\n{block}",
                reasoning="Hm 1 < 2.",
                content="So I run it <now>.",
                calls=calls,
                finish=finish,
            ),
            Golden(name=f"{name}, in thoughts", output=f"Hm.\n\n{block}", reasoning="Hm.", calls=calls, finish=finish),
        ]
        if name not in ("text behind", "second block"):
            found.append(Golden(name=f"{name}, no tools", output=block, has_tools=False, thinks=False))
    return found


def _arguments() -> list[Golden]:
    cases = [(f"text {name}", "true", value, value) for name, value in _VALUES.items()]
    cases += [(f"json {value!r}", "false", value, json.loads(value)) for value in _JSON]
    cases += [(f"no json {value!r}", "false", value, value) for value in _NO_JSON]
    return [
        Golden(
            name=f"argument, {name}",
            output=f'<{MARK}tool_calls>\n<{MARK}invoke name="run">\n<{MARK}parameter name="any" string="{attribute}">'
            f"{value}</{MARK}parameter>\n</{MARK}invoke>\n</{MARK}tool_calls>",
            calls=[["run", {"any": parsed}]],
            finish="tool_calls",
            thinks=False,
        )
        for name, attribute, value, parsed in cases
    ]
