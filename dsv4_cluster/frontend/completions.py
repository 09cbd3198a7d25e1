"""`POST /v1/completions`: raw text or token ids in, text out.

A text prompt gets BOS in front, as every official prompt has; token ids are taken as they stand.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dsv4_cluster.frontend.body import parse_object, read_body
from dsv4_cluster.frontend.caller import Caller
from dsv4_cluster.frontend.completion_body import CompletionJob, parse_completion
from dsv4_cluster.frontend.generation import Backend, copy_chunks
from dsv4_cluster.frontend.merge import merged
from dsv4_cluster.frontend.reply import stream_reply, whole_reply
from dsv4_cluster.protocol.copies import copies
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.tokenizer.completion_output import CompletionOutput, CompletionPiece, LogprobEntry


async def completions(request: Request, backend: Backend) -> Response:
    """Answer a completion request, streamed or whole. Raises: Dsv4Error, ClientDisconnect."""
    body = await read_body(request, backend.config.max_body_bytes)
    job = await backend.off_loop(
        lambda: parse_completion(
            parse_object(body),
            backend.codec,
            context_limit=backend.max_model_len,
            ignores_unknown=backend.ignores_unknown,
        )
    )
    backend.check_num_answers(len(job.prompts) * job.sampling.n)
    answer = _Answer(job, request.state.request_id.replace("req-", "cmpl-", 1), backend, request.state.caller)
    if job.is_stream:
        return await stream_reply(request, backend, answer.stream())
    return await whole_reply(request, backend, answer.whole())


@dataclass(slots=True)
class _Choice:
    """One growing answer."""

    output: CompletionOutput
    text: str
    logprobs: list[LogprobEntry]
    finish_reason: str | None = None

    def add(self, piece: CompletionPiece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


class _Answer:
    """All prompts of one request, n answers each, generated at the same time. Choice i answers prompt i // n."""

    def __init__(self, job: CompletionJob, response_id: str, backend: Backend, caller: Caller) -> None:
        self._job = job
        self._caller = caller
        self._backend = backend
        self._head = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": backend.system_fingerprint,
        }
        tokenizer = backend.codec.text
        self._generations = [copy for index in range(len(job.prompts)) for copy in self._copies(index)]
        self._outputs = [
            CompletionOutput(
                tokenizer,
                job.stop_strings,
                num_logprobs=job.num_logprobs,
                echo=generation.prompt_token_ids if job.echoes else (),
                is_echo_only=job.is_echo_only,
            )
            for generation in self._generations
        ]
        self._prompts_computed = [asyncio.Event() for _ in job.prompts]

    async def stream(self) -> AsyncGenerator[Sequence[str], None]:
        """JSON texts, one group per piece that says something."""
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                if piece.text or piece.logprobs or piece.finish_reason is not None:
                    choice = self._choice(index, piece.text, piece.logprobs, piece.finish_reason)
                    extra = {"usage": None} if self._job.include_usage else {}
                    yield [_dumps({**self._head, "choices": [choice], **extra})]
        if self._job.include_usage:
            yield [_dumps({**self._head, "choices": [], "usage": self._usage()})]

    async def whole(self) -> str:
        """The response body."""
        choices = [_Choice(output, "", []) for output in self._outputs]
        async with aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
        rendered = [self._choice(i, c.text, c.logprobs, c.finish_reason) for i, c in enumerate(choices)]
        return _dumps({**self._head, "choices": rendered, "usage": self._usage()})

    async def _pieces(self) -> AsyncGenerator[tuple[int, CompletionPiece], None]:
        """(choice index, piece) as they come."""
        streams = [self._one(index) for index in range(len(self._outputs))]
        async with aclosing(merged(streams)) as items:
            async for item in items:
                yield item

    async def _one(self, index: int) -> AsyncGenerator[CompletionPiece, None]:
        output = self._outputs[index]
        prompt_index, copy_index = divmod(index, self._job.sampling.n)
        stream = copy_chunks(
            self._backend.service,
            self._generations[index],
            self._prompts_computed[prompt_index],
            is_first=copy_index == 0,
        )
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                yield output.push(chunk)
                if output.is_finished and chunk.finish_reason is None:
                    break

    def _copies(self, prompt_index: int) -> tuple[GenerationRequest, ...]:
        """The n requests of one prompt."""
        job, backend = self._job, self._backend
        request = GenerationRequest(
            request_id=f"{self._head['id']}-{prompt_index}",
            prompt_token_ids=job.prompts[prompt_index],
            sampling=job.sampling.sampling_params(
                max_tokens=job.max_tokens[prompt_index],
                temperature=job.temperature,
                top_p=job.top_p,
                seed=backend.draw_seed() if job.seed is None else job.seed,
                logprobs=job.num_logprobs,
                prompt_logprobs=job.num_logprobs if job.echoes else None,
            ),
            stop=job.sampling.stop_params(job.stop_strings, eos_token_id=backend.codec.text.eos_token_id),
            model=backend.codec.models.canonical,
            structured=job.structured,
            **self._caller.labels(job.user_id, job.priority),
        )
        return copies(request, job.sampling.n)

    def _choice(
        self, index: int, text: str, entries: Sequence[LogprobEntry], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if self._job.num_logprobs is None else _logprobs(entries)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self._job.prompts))
        n = self._job.sampling.n  # a prompt is counted once, by the copy that had the least of it in the cache
        starts = range(0, len(self._outputs), n)
        num_cached = sum(min(output.num_cached_tokens for output in self._outputs[i : i + n]) for i in starts)
        num_completion = sum(output.num_tokens for output in self._outputs)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": 0},  # a text without a chat has no thoughts
            "prompt_cache_hit_tokens": num_cached,
            "prompt_cache_miss_tokens": num_prompt - num_cached,
        }


def _logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
