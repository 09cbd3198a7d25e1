"""Parsed answers: the same for every way of cutting the token stream, streamed or whole."""

import json

import pytest

from dsv4_cluster.protocol.output import FinishReason
from dsv4_cluster.tokenizer.chat_output import ChatMessage, ChatParser, ChatStream, response_json
from dsv4_cluster.tokenizer.completion_output import CompletionOutput
from tests.kit.codec import NAMES, chunks_of, load_codec, tokens_of

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
CALL = (
    'I will.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n'
    '<｜DSML｜parameter name="cmd" string="true">ls 2>&1 # 🎉</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
CASES = {
    "plain": ({"thinking": {"type": "disabled"}}, "Grüße, 世界 🎉! 1 < 2"),
    "thinking": ({}, "I reason é🎉.\n</think>The answer"),
    "tools": ({"tools": [TOOL]}, f"Hm.</think>{CALL}"),
    "stop": ({"stop": ["STOP", "🎉"], "thinking": {"type": "disabled"}}, "a STO b 🎉 STOP c"),
}


def parser_for(fields: dict):
    codec = load_codec()
    body = {"model": NAMES[0], "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    prompt = codec.chat.encode(body | fields, context_limit=4096)
    return ChatParser(codec.chat, prompt, response_id="id", eos_token_id=1), prompt


def whole(fields: dict, chunks) -> dict:
    parser, prompt = parser_for(fields)
    message = ChatMessage(parser, prompt, response_id="id")
    for chunk in chunks:
        message.push(chunk)
    body = json.loads(response_json([message]))
    for call in body["choices"][0]["message"].get("tool_calls", []):
        assert call.pop("id").startswith("call_")  # random
    return {"choice": body["choices"][0], "usage": body["usage"]}


def streamed(fields: dict, chunks) -> dict:
    """What a client puts together from the events of a stream."""
    parser, _ = parser_for(fields | {"stream": True, "stream_options": {"include_usage": True}})
    stream = ChatStream([parser], include_usage=True)
    message: dict = {"role": "assistant", "content": ""}
    logprobs: dict[str, list] = {}
    calls: list[dict] = []
    out: dict = {"choice": {"index": 0, "message": message}}
    for event in (json.loads(text) for chunk in chunks for text in stream.push(chunk)):
        out["usage"] = event["usage"]
        for choice in event["choices"]:
            for name in ("content", "reasoning_content"):
                if choice["delta"].get(name):
                    message[name] = message.get(name, "") + choice["delta"][name]
            for name, entries in (choice["logprobs"] or {}).items():
                logprobs[name] = logprobs.get(name, []) + (entries or [])
            for part in choice["delta"].get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append({"name": part["function"]["name"], "arguments": ""})
                calls[part["index"]]["arguments"] += part["function"].get("arguments", "")
            out["choice"]["finish_reason"] = choice["finish_reason"]
    out["choice"]["logprobs"] = logprobs
    out["calls"] = calls
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_cut_in_two_gives_the_same_message(case):
    fields, text = CASES[case]
    ids = tokens_of(text)
    expected = whole(fields, chunks_of(ids, with_logprobs=True))

    for cut in range(len(ids) + 2):
        assert whole(fields, chunks_of(ids, [cut], with_logprobs=True)) == expected


@pytest.mark.parametrize("case", CASES)
def test_a_stream_adds_up_to_the_whole_message(case):
    fields, text = CASES[case]
    ids = tokens_of(text)
    expected = whole(fields, chunks_of(ids, with_logprobs=True))

    for cuts in ([], [1], [2, 5], [len(ids)]):
        got = streamed(fields, chunks_of(ids, cuts, with_logprobs=True))

        assert got["usage"] == expected["usage"]
        assert got["choice"]["finish_reason"] == expected["choice"]["finish_reason"]
        message = expected["choice"]["message"]
        for name in ("content", "reasoning_content"):
            assert got["choice"]["message"].get(name, "") == (message.get(name) or "")
        calls = [c["function"] for c in message.get("tool_calls") or []]
        assert got["calls"] == calls
        assert got["choice"]["logprobs"].get("content", []) == (expected["choice"]["logprobs"].get("content") or [])


def test_a_tool_call_is_parsed_and_its_markup_stays_out_of_the_text():
    answer = whole(*[CASES["tools"][0], chunks_of(tokens_of(CASES["tools"][1]))])["choice"]

    message = answer["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"cmd": "ls 2>&1 # 🎉", "n": 3}
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I will.")
    assert answer["finish_reason"] == "tool_calls"


def test_eos_is_neither_text_nor_counted():
    fields, text = CASES["plain"]
    ids = tokens_of(text)

    answer = whole(fields, chunks_of(ids))

    assert answer["choice"]["message"]["content"] == text
    assert answer["usage"]["completion_tokens"] == len(ids)


def test_tokens_of_an_unfinished_character_are_counted():
    ids = tokens_of("a 🎉")[:-1]

    answer = whole({"thinking": {"type": "disabled"}}, chunks_of(ids, finish=FinishReason.LENGTH))

    assert answer["choice"]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + len(ids)


def test_text_that_looks_like_the_usage_field_is_text():
    text = '{"usage":{"a":1}} "usage":{'
    parser, _ = parser_for({"thinking": {"type": "disabled"}, "stream": True})
    stream = ChatStream([parser], include_usage=False)

    events = [json.loads(e) for chunk in chunks_of(tokens_of(text)) for e in stream.push(chunk)]

    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text
    assert not any(e.get("usage") for e in events)


def completion(chunks, stops=()):
    output = CompletionOutput(load_codec().text, stops, num_logprobs=1)
    text, entries, reasons = "", (), []
    for chunk in chunks:
        piece = output.push(chunk)
        text += piece.text
        entries += piece.logprobs
        reasons.append(piece.finish_reason)
        if output.is_finished:
            break
    return text, entries, reasons[-1], output.num_tokens


@pytest.mark.parametrize("stops", [(), ("STOP",), ("🎉",), (" b 🎉 STOP", "TO b")])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_completion_is_the_same_for_every_cut_in_two(stops, finish):
    ids = tokens_of("a STO b 🎉 STOP c") + tokens_of("🎉")[:1]
    expected = completion(chunks_of(ids, finish=finish, with_logprobs=True), stops)

    for cut in range(len(ids) + 2):
        assert completion(chunks_of(ids, [cut], finish=finish, with_logprobs=True), stops) == expected


def test_logprobs_of_a_completion_cover_exactly_the_shown_text():
    text, entries, reason, num_tokens = completion(chunks_of(tokens_of("one two STOP x"), with_logprobs=True), ["STOP"])

    assert (text, reason) == ("one two ", FinishReason.STOP)
    assert [entry.token for entry in entries][:2] == ["one", " two"]
    assert all(entry.text_offset < len(text) for entry in entries)
    assert num_tokens == len(tokens_of("one two STOP"))
