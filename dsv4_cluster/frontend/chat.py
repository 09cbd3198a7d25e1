"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from dsv4_cluster.frontend import fields
from dsv4_cluster.frontend.body import parse_object, read_body
from dsv4_cluster.frontend.generation import Backend, token_chunks
from dsv4_cluster.frontend.sse import EventStream, sse_frames, while_connected
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams, StopParams
from dsv4_cluster.tokenizer.chat_output import ChatMessage, ChatParser, ChatStream
from dsv4_cluster.tokenizer.encoding import ChatPrompt


@dataclass(frozen=True, slots=True)
class _ChatJob:
    """One checked and encoded request."""

    prompt: ChatPrompt
    include_usage: bool


async def chat_completions(request: Request, backend: Backend) -> Response:
    """Answer a chat request, streamed or whole. Raises: Dsv4Error, ClientDisconnect."""
    body = await read_body(request, backend.config.max_body_bytes)
    job = await backend.off_loop(lambda: _prepare(body, backend))
    response_id = request.state.request_id.replace("req-", "chatcmpl-", 1)
    generation = _generation_request(job.prompt, response_id, backend)
    parser = ChatParser(
        backend.codec.chat, job.prompt, response_id=response_id, eos_token_id=backend.codec.text.eos_token_id
    )
    if job.prompt.is_stream:
        groups = _stream(backend, generation, ChatStream(parser, include_usage=job.include_usage))
        return await EventStream.open(request.receive, sse_frames(groups, request.state.request_id))
    message = ChatMessage(parser, job.prompt, response_id=response_id)
    text = await while_connected(request.receive, _whole(backend, generation, message))
    return Response(text, media_type="application/json")


def _prepare(body: bytes, backend: Backend) -> _ChatJob:
    """Everything that costs CPU; runs on the encode pool."""
    checked = fields.check_chat(parse_object(body))
    prompt = backend.codec.chat.encode(checked, context_limit=backend.max_model_len)
    return _ChatJob(prompt, fields.wants_usage(checked))


def _generation_request(prompt: ChatPrompt, request_id: str, backend: Backend) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=SamplingParams(
            max_tokens=prompt.max_tokens,
            temperature=prompt.temperature,
            top_p=prompt.top_p,
            seed=backend.draw_seed() if prompt.seed is None else prompt.seed,
            logprobs=prompt.num_logprobs,
        ),
        stop=StopParams(token_ids=(backend.codec.text.eos_token_id,), strings=prompt.stop_strings),
        model=backend.codec.models.canonical,
        thinking=prompt.is_thinking,
    )


async def _stream(
    backend: Backend, generation: GenerationRequest, stream: ChatStream
) -> AsyncGenerator[Sequence[str], None]:
    """JSON texts of every chunk. A stop string ends the loop early, which closes and so aborts the generation."""
    try:
        async with aclosing(token_chunks(backend.service, generation)) as chunks:
            async for chunk in chunks:
                yield stream.push(chunk)
                if stream.parser.is_finished and chunk.finish_reason is None:
                    break
    finally:
        stream.parser.close()


async def _whole(backend: Backend, generation: GenerationRequest, message: ChatMessage) -> str:
    async with aclosing(token_chunks(backend.service, generation)) as chunks:
        async for chunk in chunks:
            message.push(chunk)
            if message.parser.is_finished and chunk.finish_reason is None:
                break
    return message.to_json()
