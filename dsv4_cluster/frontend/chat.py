"""`POST /v1/chat/completions`."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from dsv4_cluster.frontend import fields
from dsv4_cluster.frontend.body import parse_object, read_body
from dsv4_cluster.frontend.generation import Backend, copy_chunks
from dsv4_cluster.frontend.merge import merged
from dsv4_cluster.frontend.reply import stream_reply, whole_reply
from dsv4_cluster.frontend.sampling_fields import take_sampling_fields
from dsv4_cluster.frontend.turn import Turn, check_budget, check_structured
from dsv4_cluster.protocol.copies import copies
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.tokenizer.chat_output import ChatMessage, ChatParser, ChatStream, response_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _ChatJob:
    """One checked and encoded request."""

    turn: Turn
    include_usage: bool


async def chat_completions(request: Request, backend: Backend) -> Response:
    """Answer a chat request, streamed or whole. Raises: Dsv4Error, ClientDisconnect."""
    body = await read_body(request, backend.config.max_body_bytes)
    job = await backend.off_loop(lambda: _prepare(body, backend))
    response_id = request.state.request_id.replace("req-", "chatcmpl-", 1)
    generation = job.turn.generation(response_id, backend, request.state.caller)
    answer = _Answer(job, copies(generation, job.turn.sampling.n), response_id, backend)
    if job.turn.prompt.is_stream:
        return await stream_reply(request, backend, answer.stream())
    return await whole_reply(request, backend, answer.whole())


def _prepare(body: bytes, backend: Backend) -> _ChatJob:
    """Everything that costs CPU; runs on the encode pool."""
    checked = fields.check_chat(parse_object(body), ignores_unknown=backend.ignores_unknown)
    sampling = take_sampling_fields(checked, vocab_size=backend.codec.text.vocab_size)
    backend.check_num_answers(sampling.n)
    thinking_budget = fields.take_thinking_budget(checked)
    is_single_call = fields.take_single_call(checked)
    user_id, priority = fields.take_user_id(checked), fields.take_priority(checked)
    prompt = backend.codec.chat.encode(checked, context_limit=backend.max_model_len, is_single_call=is_single_call)
    check_budget(thinking_budget, prompt)
    if prompt.structured is not None:
        check_structured(prompt.structured, sampling, param="response_format")
    turn = Turn(prompt=prompt, sampling=sampling, thinking_budget=thinking_budget, user_id=user_id, priority=priority)
    return _ChatJob(turn, fields.wants_usage(checked))


class _Answer:
    """The choices of one request, generated at the same time. A stop string closes, and so aborts, its choice."""

    def __init__(
        self, job: _ChatJob, generations: Sequence[GenerationRequest], response_id: str, backend: Backend
    ) -> None:
        self._job = job
        self._generations = generations
        self._response_id = response_id
        self._backend = backend
        self._prompt_computed = asyncio.Event()
        self._parsers = [
            ChatParser(
                backend.codec.chat,
                job.turn.prompt,
                response_id=response_id,
                eos_token_id=backend.codec.text.eos_token_id,
                system_fingerprint=backend.system_fingerprint,
            )
            for _ in generations
        ]

    async def stream(self) -> AsyncGenerator[Sequence[str], None]:
        """JSON texts of every chunk, choices interleaved as they come."""
        stream = ChatStream(self._parsers, include_usage=self._job.include_usage)
        try:
            async with aclosing(merged([self._one(i, stream.push) for i in range(len(self._parsers))])) as groups:
                async for _, texts in groups:
                    yield texts
        finally:
            for parser in self._parsers:
                parser.close()

    async def whole(self) -> str:
        """The response body."""
        messages = [
            ChatMessage(parser, self._job.turn.prompt, response_id=self._response_id) for parser in self._parsers
        ]
        streams = [self._one(i, lambda chunk, index: messages[index].push(chunk)) for i in range(len(messages))]
        async with aclosing(merged(streams)) as pieces:
            async for _ in pieces:
                pass
        return response_json(messages)

    async def _one(self, index: int, push: Callable[[TokenChunk, int], T]) -> AsyncGenerator[T, None]:
        """What `push` makes of every chunk of one choice."""
        stream = copy_chunks(
            self._backend.service, self._generations[index], self._prompt_computed, is_first=index == 0
        )
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield push(chunk, index)
                if self._parsers[index].is_finished and chunk.finish_reason is None:
                    break
