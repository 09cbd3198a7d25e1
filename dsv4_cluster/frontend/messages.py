"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import deepseek_recipe as recipe
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dsv4_cluster.frontend.body import parse_object, read_body
from dsv4_cluster.frontend.error_body import anthropic_envelope, describe
from dsv4_cluster.frontend.extra_fields import take_seed
from dsv4_cluster.frontend.fields import take_priority
from dsv4_cluster.frontend.generation import Backend
from dsv4_cluster.frontend.message_fields import COUNT_TOKENS, check_messages
from dsv4_cluster.frontend.reply import named_reply, whole_reply
from dsv4_cluster.frontend.sampling_fields import take_sampling_fields
from dsv4_cluster.frontend.sse import NamedEvent, named_frame
from dsv4_cluster.frontend.turn import Turn, check_structured, parsed_events
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.tokenizer.chat_output import ChatParser
from dsv4_cluster.tokenizer.family import Event
from dsv4_cluster.tokenizer.messages_family import MESSAGES

_PING = named_frame(NamedEvent("ping", '{"type":"ping"}'))  # Anthropic's sign of life
_ANY_LENGTH = 2**31  # counting does not ask whether the prompt fits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    turn: Turn
    hides_thoughts: bool


async def messages(request: Request, backend: Backend) -> Response:
    """Answer a Messages request, streamed or whole. Raises: Dsv4Error, ClientDisconnect."""
    body = await read_body(request, backend.config.max_body_bytes)
    job = await backend.off_loop(lambda: _prepare(body, backend))
    request_id = request.state.request_id
    response_id = request_id.replace("req-", "msg_", 1)
    generation = job.turn.generation(response_id, backend, request.state.caller)
    answer = _Answer(job, generation, backend)
    if job.turn.prompt.is_stream:
        return await named_reply(
            request, backend, answer.stream(), lambda err: [_error_event(err, request_id)], keep_alive=_PING
        )
    return await whole_reply(request, backend, answer.whole())


async def count_tokens(request: Request, backend: Backend) -> Response:
    """The length of the prompt that `messages` would compute. Raises: Dsv4Error, ClientDisconnect."""
    body = await read_body(request, backend.config.max_body_bytes)

    def count() -> int:
        fields = check_messages(parse_object(body), COUNT_TOKENS, ignores_unknown=backend.ignores_unknown)
        prompt = backend.codec.chat.encode(fields.body, family=MESSAGES, context_limit=_ANY_LENGTH)
        return len(prompt.token_ids)

    return JSONResponse({"input_tokens": await backend.off_loop(count)})


def _prepare(body: bytes, backend: Backend) -> _Job:
    """Everything that costs CPU; runs on the encode pool."""
    fields = check_messages(parse_object(body), ignores_unknown=backend.ignores_unknown)
    sampling = take_sampling_fields(fields.body, vocab_size=backend.codec.text.vocab_size)
    seed, priority = take_seed(fields.body), take_priority(fields.body)
    prompt = backend.codec.chat.encode(
        fields.body, family=MESSAGES, context_limit=backend.max_model_len, is_single_call=fields.is_single_call
    )
    if prompt.structured is not None:
        check_structured(prompt.structured, sampling, param="output_config.format")
    turn = Turn(
        prompt=prompt,
        sampling=sampling,
        seed=seed,
        thinking_budget=fields.thinking_budget if prompt.is_thinking else None,
        user_id=fields.user_id,
        priority=priority,
    )
    return _Job(turn=turn, hides_thoughts=fields.hides_thoughts)


class _Answer:
    """One message, streamed or whole."""

    def __init__(self, job: _Job, generation: GenerationRequest, backend: Backend) -> None:
        self._job = job
        self._generation = generation
        self._backend = backend
        self._parser = ChatParser(
            backend.codec.chat,
            job.turn.prompt,
            response_id=generation.request_id,
            eos_token_id=backend.codec.text.eos_token_id,
        )

    async def stream(self) -> AsyncGenerator[Sequence[NamedEvent], None]:
        """The named events of every chunk."""
        async with aclosing(self._events()) as groups:
            async for events in groups:
                yield [named for event in events if (named := self._named(event)) is not None]

    async def whole(self) -> str:
        """The response body."""
        prompt = self._job.turn.prompt
        message = recipe.MessagesResponse(self._generation.request_id, prompt.model, 0, len(prompt.token_ids), 0)
        async with aclosing(self._events()) as groups:
            async for events in groups:
                for event in events:
                    message.accumulate(cast(recipe.MessagesStreamEvent, event))
        body: dict[str, Any] = json.loads(message.to_json())
        self._count(body["usage"])
        if self._job.hides_thoughts:
            body["content"] = [
                {**block, "thinking": ""} if block["type"] == "thinking" else block for block in body["content"]
            ]
        return _dumps(body)

    def _events(self) -> AsyncGenerator[list[Event], None]:
        return parsed_events(self._parser, self._generation, self._backend)

    def _named(self, event: Event) -> NamedEvent | None:
        """None for what the client asked not to see."""
        name = recipe.MessagesResponse.sse_event_name(cast(recipe.MessagesStreamEvent, event))
        text = event.to_json()
        if name == "message_delta":
            value = json.loads(text)
            self._count(value["usage"])
            text = _dumps(value)
        elif self._job.hides_thoughts and name == "content_block_delta" and '"delta":{"type":"thinking_delta"' in text:
            return None
        return NamedEvent(name or "", text)

    def _count(self, usage: dict[str, Any]) -> None:
        """The parser does not count the tokens of a character that the answer leaves unfinished; we generated them."""
        usage["output_tokens"] = self._parser.num_tokens
        usage["output_tokens_details"] = {"thinking_tokens": self._parser.num_thought_tokens}


def _error_event(err: Exception, request_id: str) -> NamedEvent:
    return NamedEvent("error", anthropic_envelope(describe(err, request_id), request_id))


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
