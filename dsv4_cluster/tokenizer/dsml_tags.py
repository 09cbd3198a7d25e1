"""DSML tags in model output, also the ones a model gets wrong.

A tag is recognised by its mark: `DSML` between bars, fullwidth or ASCII, behind `<` or `</`; or the fullwidth mark
alone, which is one special token and so never ordinary text, its right bar an ASCII one or missing at times. Everything
else is text: `1 < 2`, `<div>`, `a <| b`, `|DSML|`, a lone `<｜`.
`<invoke ...>` without a mark is a tag only inside a block that a marked tag has opened.
"""

import re
from dataclasses import dataclass
from enum import Enum

from dsv4_cluster.tokenizer.text import THINK_END

MAX_TAG_CHARS = 2048  # an opening tag that is still open after so many characters is cut at its first ">"
MAX_MARK_CHARS = 13  # of a mark that is not complete: "<", "/" and blanks, four bars or blanks, letters and a blank
TRIGGERS = ("<", "｜")  # every tag starts with one of these
_BARS = r"[|｜]"
# "<" and DSML with a bar on at least one side, or the mark alone
_MARK = re.compile(
    rf"<\s?(/?)\s?(?:{_BARS}[|｜ ]{{0,3}}(?i:DSML)|DSML\s?{_BARS}){_BARS}{{0,2}}|｜{{1,2}}DSML{_BARS}{{0,2}}"
)
_ANY_CASE = "(?i:D(?:S(?:ML?)?)?)?"  # any beginning of the letters
_EXACT = "(?:D(?:S(?:M(?:L\\s?)?)?)?)?"
_MARK_START = re.compile(rf"<\s?/?\s?(?:{_BARS}[|｜ ]{{0,3}}{_ANY_CASE}|{_EXACT})|｜{{1,2}}{_EXACT}")
_IDENTIFIER = re.compile(r"\s?(/?)\s?([A-Za-z_-]{0,32})")
_CLOSING_REST = re.compile(r"[ \t|｜/]*")
_UNMARKED = re.compile(r"<(/?)([a-z_]{1,16})(?=[\s>/=])")
_ATTRIBUTE = re.compile(r"""([A-Za-z_]+)\s*=\s*(?:"([^"]*)"?|'([^']*)'?|([^\s"'>/]+))""")
_NAME_ATTRIBUTES = ("name", "tool", "function", "key")


class TagKind(Enum):
    """What a tag encloses."""

    WRAPPER = "tool_calls"
    INVOKE = "invoke"
    PARAMETER = "parameter"
    THOUGHTS = "think"  # closing tag only; it has no mark
    OTHER = ""  # a mark with nothing known behind it


_MARKED_KINDS = (TagKind.WRAPPER, TagKind.INVOKE, TagKind.PARAMETER)
_KINDS = {
    **dict.fromkeys(("toolcalls", "toolcall", "tools", "tool", "functioncalls", "calls"), TagKind.WRAPPER),
    **dict.fromkeys(("invoke", "call", "function", "functioncall"), TagKind.INVOKE),
    **dict.fromkeys(("parameter", "param", "argument", "arg"), TagKind.PARAMETER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """One tag, at `text[start:end]` of the text it was found in."""

    kind: TagKind
    end: int
    is_closing: bool = False
    is_empty: bool = False  # <.../>
    is_marked: bool = True
    name: str = ""
    string: str | None = None  # value of the `string` attribute, as written


class Unfinished(Enum):
    """The text may yet become a tag."""

    TAG = "tag"


def first_trigger(text: str, start: int = 0) -> int:
    """Where the next tag could start; -1 for nowhere."""
    found = [index for trigger in TRIGGERS if (index := text.find(trigger, start)) >= 0]
    return min(found, default=-1)


def parse_tag(text: str, start: int, *, is_last: bool, takes_unmarked: bool) -> Tag | Unfinished | None:
    """The tag at `start`, None when it is text, or Unfinished when the rest decides. is_last: there is no rest."""
    mark = _MARK.match(text, start)
    if mark is None:
        if not is_last and may_become_mark(text[start:]):
            return Unfinished.TAG
        if is_last and is_cut_mark(text[start:]):
            return Tag(kind=TagKind.OTHER, end=len(text))
        return _unmarked_tag(text, start, is_last=is_last) if takes_unmarked else None
    if mark.end() == len(text) and not is_last:
        return Unfinished.TAG
    identifier = _IDENTIFIER.match(text, mark.end())
    assert identifier is not None, "the pattern matches nothing, too"
    if identifier.end() == len(text) and not is_last:
        return Unfinished.TAG
    is_closing = bool(mark.group(1) or identifier.group(1))
    kind = _kind(identifier.group(2))
    if kind is TagKind.OTHER:
        return _other_tag(text, mark.end(), identifier.end(), is_closing=is_closing)
    if is_closing:
        return _closing_tag(text, kind, identifier.end(), is_last=is_last, is_marked=True)
    return _opening_tag(text, kind, identifier.end(), is_last=is_last, is_marked=True)


def parse_thoughts_end(text: str, start: int, *, is_last: bool) -> Tag | Unfinished | None:
    """The same for the end of the thoughts: one special token, or its spelling."""
    if text.startswith(THINK_END, start):
        return Tag(kind=TagKind.THOUGHTS, end=start + len(THINK_END), is_closing=True)
    return Unfinished.TAG if not is_last and THINK_END.startswith(text[start:]) else None


def _kind(identifier: str) -> TagKind:
    """Also of a name that was cut short."""
    known = _KINDS.get(identifier.replace("_", "").replace("-", "").lower())
    if known is not None:
        return known
    cut = (kind for kind in _MARKED_KINDS if identifier and kind.value.startswith(identifier))
    return next(cut, TagKind.OTHER)


def _other_tag(text: str, mark_end: int, identifier_end: int, *, is_closing: bool) -> Tag:
    """A mark goes with its name when that closes at once; otherwise what follows is text."""
    has_end = text.startswith(">", identifier_end)
    return Tag(kind=TagKind.OTHER, end=identifier_end + 1 if has_end else mark_end, is_closing=is_closing)


def _closing_tag(text: str, kind: TagKind, end: int, *, is_last: bool, is_marked: bool) -> Tag | Unfinished:
    """Its ">" may be missing."""
    rest = _CLOSING_REST.match(text, end)
    assert rest is not None
    if rest.end() == len(text) and not is_last:
        return Unfinished.TAG
    if text.startswith(">", rest.end()):
        end = rest.end() + 1
    return Tag(kind=kind, end=end, is_closing=True, is_marked=is_marked)


def _opening_tag(text: str, kind: TagKind, start: int, *, is_last: bool, is_marked: bool) -> Tag | Unfinished:
    """Up to a ">" outside of quotes; a line end, another "<" or the size limit end a tag that lacks it."""
    end = content_end = None
    quote = ""
    for index in range(start, min(len(text), start + MAX_TAG_CHARS)):
        char = text[index]
        if char in "\n<":
            content_end, end = index, index + (char == "\n")
            break
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == ">":
            content_end, end = index, index + 1
            break
    if end is None:
        if not is_last and len(text) < start + MAX_TAG_CHARS:
            return Unfinished.TAG
        content_end = end = min(len(text), start + MAX_TAG_CHARS)
    assert content_end is not None
    if not text.startswith(">", content_end):
        early = text.find(">", start, content_end)
        if early >= 0:
            content_end, end = early, early + 1
    inside = text[start:content_end]
    attributes = _attributes(inside)
    return Tag(
        kind=kind,
        end=end,
        is_empty=inside.rstrip().endswith("/"),
        is_marked=is_marked,
        name=_name(attributes),
        string=attributes.get("string"),
    )


def _attributes(text: str) -> dict[str, str]:
    text = text.replace('\\"', '"').replace("“", '"').replace("”", '"')
    if text.lstrip().startswith("="):
        text = "name" + text.lstrip()
    return {
        found.group(1).lower(): next((value for value in found.groups()[1:] if value is not None), "")
        for found in _ATTRIBUTE.finditer(text)
    }


def _name(attributes: dict[str, str]) -> str:
    """Under its own attribute, under one it is mistaken for, or as the only attribute there is."""
    for attribute in _NAME_ATTRIBUTES:
        if attribute in attributes:
            return attributes[attribute].strip()
    others = [value for attribute, value in attributes.items() if attribute not in ("string", "type")]
    return others[0].strip() if len(others) == 1 else ""


def _unmarked_tag(text: str, start: int, *, is_last: bool) -> Tag | Unfinished | None:
    if not text.startswith("<", start):
        return None
    tag = _UNMARKED.match(text, start)
    if tag is None:
        rest = text[start + 1 :].removeprefix("/")
        may_go_on = not is_last and len(rest) <= 16 and (not rest or re.fullmatch("[a-z_]*", rest) is not None)
        return Unfinished.TAG if may_go_on else None
    kind = _KINDS.get(tag.group(2).replace("_", ""), TagKind.OTHER)
    if kind is TagKind.OTHER:
        return None
    if tag.group(1):
        return _closing_tag(text, kind, tag.end(), is_last=is_last, is_marked=False)
    return _opening_tag(text, kind, tag.end(), is_last=is_last, is_marked=False)


def may_become_mark(text: str) -> bool:
    """Whether a text is the beginning of a mark and no more than that."""
    return _MARK_START.fullmatch(text) is not None


def is_cut_mark(text: str) -> bool:
    """Whether a text is the beginning of a mark and at least one letter of it."""
    return may_become_mark(text) and re.search(_BARS + " ?D", text, re.IGNORECASE) is not None
