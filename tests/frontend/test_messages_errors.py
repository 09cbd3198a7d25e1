"""Errors on the paths of the Messages API: Anthropic's envelope, and the field that is at fault."""

import anthropic
import pytest

from dsv4_cluster.errors import OverloadedError

MODEL = "deepseek-v4-flash"
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
TOOL = {"name": "b", "input_schema": {"type": "object"}}


def post(http, body, path="/v1/messages"):
    return http.post(path, json={"model": MODEL, "messages": HI, "max_tokens": 9, **body})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "b", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]},
                ]
            },
            "messages[2].content[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "hi", "name": "x"}]}, "messages[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "zz"}}, "zz"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 4}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"task_budget": 1}}, "output_config.task_budget"),
        ({"metadata": {"user_id": "x" * 600}}, "metadata.user_id"),
        ({"metadata": {"team": "x"}}, "metadata.team"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"n": 2}, "n"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, "17"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "invalid"),
    ],
)
def test_what_is_not_honoured_is_a_400_that_names_it(http, service, body, named):
    answer = post(http, body)

    error = answer.json()
    assert answer.status_code == 400
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"]
    assert not service.requests


def test_an_unknown_model_is_not_found(claude):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="claude-x", messages=HI, max_tokens=9)

    assert caught.value.body["error"]["type"] == "not_found_error"
    assert "claude-x" in caught.value.message


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/anthropic/v1/messages"])
def test_oversized_and_broken_bodies_have_the_envelope(http, path, max_body_bytes):
    large = http.post(path, content=b'"' + b"x" * max_body_bytes)
    broken = http.post(path, content=b"{")

    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/messages/none", "/anthropic/v1/messages/batches"])
def test_unknown_paths_and_methods_have_the_envelope(http, path):
    assert http.post(path).json()["error"]["type"] == "not_found_error"
    assert http.get("/v1/messages").json()["type"] == "error"


def test_a_full_cluster_is_a_rate_limit_error(claude, service):
    service.script = lambda _: [OverloadedError("full")]

    with pytest.raises(anthropic.RateLimitError) as caught:
        claude.messages.create(model=MODEL, messages=HI, max_tokens=9)

    assert caught.value.body["error"] == {"type": "rate_limit_error", "message": "full"}
    assert caught.value.response.headers["retry-after"] == "1"


def test_counting_takes_the_fields_of_the_prompt_only(http, service):
    fine = http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": HI})
    refused = post(http, {}, "/v1/messages/count_tokens")

    assert fine.json() == {"input_tokens": fine.json()["input_tokens"]}
    assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]["message"]
