"""The response object of the Responses API: what deepseek-recipe's events do not know of the request, and the states
in which it never sees it (queued, cancelled, failed).
"""

import json
from collections.abc import Mapping
from typing import Any

from dsv4_cluster.frontend.error_body import ErrorBody

FINAL_EVENTS = frozenset({"response.completed", "response.incomplete"})
_ECHOED = ("previous_response_id", "metadata", "safety_identifier", "prompt_cache_key", "tool_choice", "user")


def echoed(body: Mapping[str, Any], *, is_stored: bool) -> dict[str, Any]:
    """The fields of a response object that repeat the request. body: as the client wrote it."""
    own = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        own["tools"] = body.get("tools") or []  # the conversion sees the allowed ones only
    return {
        **own,
        "store": is_stored,
        "background": body.get("background") is True,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "max_tool_calls": body.get("max_tool_calls"),
        "presence_penalty": body.get("presence_penalty") or 0.0,
        "frequency_penalty": body.get("frequency_penalty") or 0.0,
    }


def counted(response: dict[str, Any], *, num_tokens: int, num_thought_tokens: int) -> None:
    """Put the tokens that were generated into the usage; deepseek-recipe's own counts are not always those."""
    usage = response.get("usage")
    if usage is not None:
        usage["output_tokens"] = num_tokens
        usage["output_tokens_details"] = {"reasoning_tokens": num_thought_tokens}
        usage["total_tokens"] = usage["input_tokens"] + num_tokens


def failed(response: Mapping[str, Any], error: ErrorBody) -> dict[str, Any]:
    """The same response, ended by an error."""
    code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
    return {**response, "status": "failed", "error": {"code": code, "message": error.message}}


def cancelled_body(body: str) -> str:
    """The stored body of a response that somebody cancels."""
    return dumps({**json.loads(body), "status": "cancelled"})


def lost_body(body: str) -> str:
    """The stored body of a response whose router is gone."""
    error = {"code": "server_error", "message": "the router that generated this response was lost"}
    return dumps({**json.loads(body), "status": "failed", "error": error})


def item_page(
    items: list[dict[str, Any]], *, after: str | None, limit: int, is_ascending: bool
) -> dict[str, Any] | None:
    """A page of input items, each with an id; None when `after` names none of them."""
    named = [{"id": f"item_{index}", **item} for index, item in enumerate(items)]
    ordered = named if is_ascending else named[::-1]
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            return None
        start = ids.index(after) + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }


def dumps(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
