"""What `/v1/responses` does not honour is a 400 that names the field."""

import pytest

MODEL = "deepseek-v4-flash"
TOOL = {"type": "function", "name": "b", "parameters": {"type": "object"}}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"store": "yes"}, "store"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": "x"}, "include"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_object", "depth": 1}}}, "text.format.depth"),
        ({"reasoning": {"context": "all"}}, "reasoning.context"),
        ({"reasoning": "high"}, "reasoning"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tools": [{"type": ["function"]}]}, "tools[0]"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "zz"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 1}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "z"}]},
            },
            "tool_choice",
        ),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": {}}]}, "input[0]"),
        ({"input": 3}, "input"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"safety_identifier": "x" * 600}, "safety_identifier"),
        ({"n": 2}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"thinking_token_budget": 9, "reasoning": {"effort": "none"}}, "thinking_token_budget"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"input": []}, None),
        ({"max_output_tokens": 0}, None),
    ],
)
def test_what_is_not_honoured_is_a_400_that_names_it(http, service, body, param):
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "hi", **body})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == param
    assert not service.requests


def test_an_earlier_response_that_is_unknown_is_a_404(http, service):
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "hi", "previous_response_id": "resp_none"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "order=up", "after=item_9", "limit=" + "9" * 5000]
)
def test_a_bad_page_is_a_400(http, service, query):
    made = http.post("/v1/responses", json={"model": MODEL, "input": "hi"}).json()

    answer = http.get(f"/v1/responses/{made['id']}/input_items?{query}")

    assert answer.status_code == 400 and answer.json()["error"]["param"] == query.split("=")[0]


def test_a_stored_response_is_not_streamed_again(http, service):
    made = http.post("/v1/responses", json={"model": MODEL, "input": "hi"}).json()

    assert http.get(f"/v1/responses/{made['id']}?stream=true").status_code == 400


def test_no_allowed_tools_of_no_tools_is_an_answer_without_tools(http):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": []}

    answer = http.post("/v1/responses", json={"model": "deepseek-v4-flash", "input": "hi", "tool_choice": choice})

    assert answer.status_code == 200
    assert answer.json()["tools"] == []
