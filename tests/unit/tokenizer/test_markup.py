"""Tool markup that a model gets wrong: recovered as calls, or removed; never shown."""

import json

import pytest

from dsv4_cluster.protocol.output import FinishReason
from tests.kit.answers import parser_of, prompt_of, streamed_answer, whole_answer
from tests.kit.codec import chunks_of, tokens_of

M = "｜DSML｜"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "run", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
OFF = {"thinking": {"type": "disabled"}}
CALL = [["run", '{"cmd": "ls"}']]


def wrapped(inside: str) -> str:
    return f"\n\n<{M}tool_calls>\n{inside}\n</{M}tool_calls>"


def invoke(inside: str, name: str = "run") -> str:
    return f'<{M}invoke name="{name}">\n{inside}\n</{M}invoke>'


def parameter(value: str, name: str = "cmd", string: str = "true") -> str:
    return f'<{M}parameter name="{name}" string="{string}">{value}</{M}parameter>'


PROPER = wrapped(invoke(parameter("ls")))


def answer(text: str, *, finish: FinishReason = FinishReason.STOP, is_single_call: bool = False, **fields) -> dict:
    prompt = prompt_of({"tools": TOOLS, **OFF, **fields}, is_single_call=is_single_call)
    chunks = chunks_of(tokens_of(text), finish=finish)
    found = whole_answer(prompt, chunks)
    streamed = streamed_answer(prompt, chunks)
    assert streamed == found
    return found


@pytest.mark.parametrize(
    "text",
    [
        PROPER,
        PROPER.replace("｜", "|"),
        PROPER.replace("</｜DSML｜", "</|DSML|"),
        PROPER.replace("<｜", "<｜｜").replace("｜>", "｜｜>"),
        PROPER.replace("DSML｜", "DSML"),
        PROPER.replace("<｜DSML｜", "<DSML｜"),
        PROPER.replace("<｜DSML", "< ｜ DSML"),
        PROPER.replace("DSML", "dsml"),
        PROPER.replace("<｜DSML｜tool_calls>", "｜DSML｜tool_calls>"),
        PROPER.replace("tool_calls", "function_calls"),
        PROPER.replace("tool_calls", "toolcalls"),
        PROPER.replace("tool_calls", "tool"),
        PROPER.replace("</｜DSML｜", "<｜DSML｜/"),
        PROPER.replace("tool_calls>\n<", "tool_calls\n<"),
        PROPER.replace('name="run">', 'name="run"'),
        PROPER.replace('name="run"', "name='run'"),
        PROPER.replace('name="run"', "name=run"),
        PROPER.replace('name="run"', 'name=\\"run\\"'),
        PROPER.replace('name="run"', 'name="run'),
        PROPER.replace('name="run"', 'tool="run"'),
        PROPER.replace('invoke name="run"', 'invoke="run"'),
        PROPER.replace('name="cmd"', 'key="cmd"'),
        PROPER.replace('string="true"', 'string="True"'),
        PROPER.replace('string="true"', "string=true"),
        PROPER.replace(' string="true"', ""),
        PROPER.replace('string="true"', 'type="string"'),
        PROPER.replace('string="true"', 'string="false"'),
        PROPER.replace(">ls<", ">ls</｜DSML｜parameter\n<"),
        PROPER.replace("</｜DSML｜parameter>", "</｜DSML｜param>"),
        PROPER.replace("</｜DSML｜parameter>\n", ""),
        PROPER.replace("</｜DSML｜parameter>", "</｜DSML｜>"),
        PROPER.replace("\n</｜DSML｜invoke>", ""),
        PROPER.replace("\n</｜DSML｜tool_calls>", ""),
        PROPER.partition(">ls")[0] + ">ls</｜DSML｜para",
        PROPER.partition(">ls")[0] + ">ls</｜DSML｜",
        PROPER.partition(">ls")[0] + ">ls",
        PROPER.replace("<｜DSML｜tool_calls>\n", ""),
        invoke(parameter("ls")),
        PROPER + "\n\nThat is what I do.",
        PROPER.replace("</｜DSML｜tool_calls>", "Then I wait."),
        PROPER + PROPER,
        PROPER.replace("<｜DSML｜invoke", "<invoke").replace("</｜DSML｜invoke", "</invoke"),
        PROPER.replace("<｜DSML｜param", "<param").replace("</｜DSML｜param", "</param"),
        wrapped(invoke('{"cmd": "ls"}')),
        f"\n<{M}tool_calls>" + PROPER,
    ],
)
def test_a_call_is_recovered(text):
    found = answer(text)

    assert [found["tool_calls"], found["finish_reason"]] == [CALL, "tool_calls"]
    assert found["content"].strip() == found["reasoning_content"] == ""


@pytest.mark.parametrize("text", [PROPER, PROPER.replace("｜", "|"), invoke(parameter("ls"))])
@pytest.mark.parametrize("gap", ["", "</think>", "</think>Well.", "\n</think>\n\nWell."])
def test_a_block_ends_the_thoughts_wherever_it_comes(text, gap):
    found = answer(f"Hm.{gap}{text} More.</think>Even more.", thinking={"type": "enabled"})

    assert found["tool_calls"] == CALL
    assert (found["reasoning_content"].strip(), found["content"]) == ("Hm.", "Well." if "Well" in gap else "")


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize(
    "text",
    [
        "1 < 2 and 2>&1 <div> a <| b <｜ c ｜ |DSML| <DSML> <dsml:x> <User｜ < / |",
        "if (a<b) {} x <<= 3; y<|z|>w </think",
        "｜DS <｜User is a name",
        "<tool_calls><invoke name='f'><parameter>1</parameter></invoke></tool_calls>",
        "cat <<EOF\n<",
        "a </",
        "a <｜",
        "a <|",
        "a < ",
        "<",
    ],
)
def test_text_that_only_looks_like_markup_is_unchanged(text, tools, thinking):
    found = answer(text, tools=tools, thinking={"type": thinking})

    assert found["reasoning_content" if thinking == "enabled" else "content"] == text
    assert (found["tool_calls"], found["finish_reason"]) == ([], "stop")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"The {M} mark", "The  mark"),
        (f"a <{M}foo> b", "a  b"),
        (f"a <{M}tool_calls> b </{M}tool_calls> c", "a  b  c"),
        (f"a </{M}parameter> b", "a  b"),
        (f"a {parameter('b')} c", "a b c"),
        (f"a <{M}invoke> b", "a  b"),
        (f'a <{M}invoke name="no_such_tool"> b', "a  b"),
        (f"a <{M}tool_ca", "a "),
        ("a <｜DSM", "a "),
        ("a <|DSML|", "a "),
    ],
)
def test_a_tag_that_is_no_call_is_removed_and_its_surroundings_stay(text, shown):
    found = answer(text)

    assert (found["content"], found["tool_calls"], found["finish_reason"]) == (shown, [], "stop")


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}])
@pytest.mark.parametrize("text", [PROPER, PROPER.replace("｜", "|"), invoke(parameter("ls")), PROPER[:-30]])
def test_without_tools_a_block_is_removed_and_the_answer_goes_on(text, fields):
    end = "" if text == PROPER[:-30] else " After."

    found = answer(f"Before.{text}{end}", **fields)

    assert "".join(found["content"].split()) == f"Before.{end.strip()}"
    assert (found["tool_calls"], found["finish_reason"]) == ([], "stop")


@pytest.mark.parametrize(
    "inside",
    [
        "",
        invoke(parameter("ls")),
        invoke(parameter("ls")).removesuffix(f"</{M}invoke>"),
        f'<{M}invoke name="run">',
        f'<{M}invoke name="run">\n{parameter("ls -l </thi")[:-20]}',
        f'<{M}invoke name="run">\n<{M}parameter name="cmd" string="true">ls </',
        f'<{M}invoke name="run">\n<{M}parameter name="cmd" string="fal',
    ],
)
def test_without_tools_a_block_that_the_thoughts_leave_open_ends_with_them(inside):
    text = f"Hm.<{M}tool_calls>\n{inside}</think>So it is."
    prompt = prompt_of({})

    for ids in (tokens_of(text), [token_id for char in text for token_id in tokens_of(char)]):
        found = streamed_answer(prompt, chunks_of(ids))
        assert found == whole_answer(prompt, chunks_of(ids))
        assert (found["reasoning_content"], found["content"]) == ("Hm.", "So it is.")
        num_thoughts = len(ids) - len(tokens_of("</think>So it is.") if ids == tokens_of(text) else "</think>So it is.")
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thoughts


def test_an_unknown_tool_in_a_wrapper_is_passed_on_for_the_client_to_refuse():
    assert answer(wrapped(invoke("", "other")))["tool_calls"] == [["other", "{}"]]


@pytest.mark.parametrize(
    ("string", "value", "parsed"),
    [
        ("true", "3", "3"),
        ("true", '{"a": 1}', '{"a": 1}'),
        ("true", '"quoted" \\ back\nline', '"quoted" \\ back\nline'),
        ("true", "\n\n  kept \n", "\n\n  kept \n"),
        ("true", "echo a < b </ 2>&1 <", "echo a < b </ 2>&1 <"),
        ("true", "</think> <div> </parameter> ｜ <｜ 🎉", "</think> <div> </parameter> ｜ <｜ 🎉"),
        ("false", "3", 3),
        ("false", ' {"a": [1, null, "b"]}\n', {"a": [1, None, "b"]}),
        ("false", '"quoted"', "quoted"),
        ("false", "Paris", "Paris"),
        ("false", '{"a": 1', '{"a": 1'),
        ("false", "NaN", "NaN"),
        ("false", "", ""),
        ("maybe", "3", 3),
        ("maybe", "three", "three"),
    ],
)
def test_arguments_always_parse_and_keep_what_was_written(string, value, parsed):
    (call,) = answer(wrapped(invoke(parameter(value, "any", string))))["tool_calls"]

    assert json.loads(call[1]) == {"any": parsed}


def test_a_name_that_would_break_the_json_does_not():
    text = wrapped(invoke(parameter("1", "first na'm\\e", "false") + parameter("x", "b")))

    assert json.loads(answer(text)["tool_calls"][0][1]) == {"first na'm\\e": 1, "b": "x"}


def test_several_calls_and_one_without_arguments():
    text = wrapped(invoke(parameter("ls") + "\n" + parameter("3", "n", "false")) + "\n" + invoke("", "now"))

    assert answer(text)["tool_calls"] == [["run", '{"cmd": "ls", "n": 3}'], ["now", "{}"]]


def test_the_length_limit_leaves_a_call_open_and_says_so():
    begun = wrapped(invoke(parameter("ls -l"))).partition(" -l")[0]

    found = answer(begun, finish=FinishReason.LENGTH)

    assert (found["tool_calls"], found["finish_reason"]) == ([["run", '{"cmd": "ls']], "length")


def test_generation_stops_where_the_block_closes_and_later_tokens_do_not_count():
    prompt = prompt_of({"tools": TOOLS, **OFF})
    ids = tokens_of(PROPER)
    parser = parser_of(prompt)

    for chunk in chunks_of([*ids, *tokens_of(" More text.")], [len(ids) - 3], finish=FinishReason.LENGTH):
        assert not parser.is_finished
        parser.push(chunk)

    assert parser.is_finished
    assert parser.num_tokens == len(ids)


def test_one_call_at_most_ends_the_answer_behind_the_first():
    text = wrapped(invoke(parameter("ls")) + "\n" + invoke(parameter("ps")))

    assert len(answer(text)["tool_calls"]) == 2
    assert answer(text, is_single_call=True)["tool_calls"] == CALL


def test_a_long_text_argument_streams_as_it_comes():
    value = "word " * 200
    prompt = prompt_of({"tools": TOOLS, **OFF})
    parser = parser_of(prompt)
    head, tail = PROPER.split("ls<")
    sent = [len(parser.push(chunk)) for chunk in chunks_of(tokens_of(head + value + "<" + tail))]

    first = len(tokens_of(head))
    assert all(sent[first : first + 190])


def test_logprobs_are_those_of_the_shown_text():
    fields = {"tools": TOOLS, "logprobs": True}
    text = f"I think 1 < 2.</think>So <{M}foo> it is.{PROPER}"
    chunks = chunks_of(tokens_of(text), with_logprobs=True)

    found = whole_answer(prompt_of(fields), chunks)

    shown = {name: "".join(entry["token"] for entry in entries) for name, entries in found["logprobs"].items()}
    assert shown == {"reasoning_content": "I think 1 < 2.", "content": "So it is.\n\n"}  # " <" is half markup
    assert found["content"] == "So  it is."
    assert found["usage"]["completion_tokens"] == len(tokens_of(text))
