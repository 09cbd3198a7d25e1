"""`POST /tokenize` and `POST /detokenize`: text to token ids and back, as the chat and completion endpoints see it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.frontend.body import parse_object, read_body
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.fields import check_chat
from dsv4_cluster.frontend.generation import Backend

TOKENIZE_FIELDS = frozenset({"model", "prompt", "messages", "add_special_tokens", "return_token_strs"})
TOKENIZE_CHAT_FIELDS = frozenset({"tools", "tool_choice", "response_format", "thinking", "reasoning_effort"})
DETOKENIZE_FIELDS = frozenset({"model", "tokens"})


async def tokenize(request: Request, backend: Backend) -> Response:
    """Token ids of `prompt` (BOS in front unless add_special_tokens is false) or of rendered `messages`."""
    body = await read_body(request, backend.config.max_body_bytes)
    return JSONResponse(await backend.off_loop(lambda: _tokenize(parse_object(body), backend)))


async def detokenize(request: Request, backend: Backend) -> Response:
    """The text of `tokens`, special tokens spelled out."""
    body = await read_body(request, backend.config.max_body_bytes)
    return JSONResponse(await backend.off_loop(lambda: _detokenize(parse_object(body), backend)))


def _tokenize(fields: dict[str, Any], backend: Backend) -> dict[str, Any]:
    is_chat = "messages" in fields
    _check(fields, TOKENIZE_FIELDS | (TOKENIZE_CHAT_FIELDS if is_chat else frozenset()), backend)
    text = backend.codec.text
    if is_chat == ("prompt" in fields):
        raise FieldError("give either prompt or messages", param="prompt")
    wants_strings = _flag(fields, "return_token_strs", default=False)
    if is_chat:
        chat = {name: value for name, value in fields.items() if name != "return_token_strs"}
        if _flag(chat, "add_special_tokens", default=True) is False:
            raise FieldError("messages are rendered with special tokens, always", param="add_special_tokens")
        chat.pop("add_special_tokens", None)
        chat.setdefault("model", backend.codec.models.canonical)
        token_ids = list(backend.codec.chat.encode(check_chat(chat), context_limit=backend.max_model_len).token_ids)
    elif not isinstance(fields["prompt"], str):
        raise FieldError("prompt must be a string", param="prompt")
    else:
        with_bos = _flag(fields, "add_special_tokens", default=True)
        token_ids = text.encode_prompt(fields["prompt"]) if with_bos else text.encode(fields["prompt"])
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": backend.max_model_len,
        "tokens": token_ids,
    }
    if wants_strings:
        answer["token_strs"] = [text.decode([token_id]) for token_id in token_ids]
    return answer


def _detokenize(fields: dict[str, Any], backend: Backend) -> dict[str, Any]:
    _check(fields, DETOKENIZE_FIELDS, backend)
    tokens, vocab_size = fields.get("tokens"), backend.codec.text.vocab_size
    if not isinstance(tokens, list):
        raise FieldError("tokens must be a list of token ids", param="tokens")
    for token_id in tokens:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise FieldError(f"tokens holds {token_id!r:.40}; expected ids from 0 to {vocab_size - 1}", param="tokens")
    return {"prompt": backend.codec.text.decode(tokens)}


def _flag(fields: dict[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise FieldError(f"{name} must be a boolean", param=name)
    return value


def _check(fields: dict[str, Any], known: frozenset[str], backend: Backend) -> None:
    """Raises: FieldError for unknown fields, ModelNotFoundError for a model that is not served here."""
    if backend.config.api.unknown_fields == "reject":
        for name in fields:
            if name not in known:
                raise FieldError(f"unknown field {name!r:.80}", param=name)
    model = fields.get("model", backend.codec.models.canonical)
    if not isinstance(model, str):
        raise InvalidRequestError("model must be a string")
    backend.codec.models.resolve(model)
