"""What every endpoint shares: the service, the codec, limits, and running a generation to its end or to its close."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import DeadlineExceededError, Dsv4Error
from dsv4_cluster.frontend.background import BackgroundRuns
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.protocol.copies import can_share
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.services import GenerationService, ResponseStore
from dsv4_cluster.tokenizer.encoding import ModelCodec

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The parts behind the endpoints; built once per app."""

    service: GenerationService
    codec: ModelCodec
    config: RouterConfig
    max_model_len: int  # prompt + answer, in tokens
    encode_pool: ThreadPoolExecutor
    system_fingerprint: str | None  # changes with whatever may change an answer to the same seed
    draw_seed: Callable[[], int]  # 0 <= seed < 2**63, for requests that bring none
    responses: ResponseStore
    background: BackgroundRuns

    @property
    def ignores_unknown(self) -> bool:
        """Body fields that nothing here knows are dropped; otherwise they are refused."""
        return self.config.api.unknown_fields == "ignore"

    def check_num_answers(self, num_answers: int) -> None:
        """Refuse what no retry could help: more answers than may be in flight. Raises: FieldError."""
        limit = self.config.max_ongoing_requests
        if num_answers > limit:
            raise FieldError(
                f"{num_answers} answers are asked for (n, times the number of prompts), "
                f"router.max_ongoing_requests is {limit}",
                param="n",
            )

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run parsing and encoding on the pool: 25k tokens take about 30 ms of CPU, which the loop does not have.

        Raises: what `work` raises, DeadlineExceededError.
        """
        limit_s = self.config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.get_running_loop().run_in_executor(self.encode_pool, work)
        except TimeoutError:
            raise DeadlineExceededError(f"the prompt was not encoded within {limit_s} s") from None


async def token_chunks(service: GenerationService, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
    """Chunks up to the one with a finish reason. Closing early closes the service's stream, which aborts the request.

    Raises: what the service raises or reports in a chunk; Dsv4Error when the stream has no end.
    """
    is_finished = False
    async with aclosing(service.generate(request)) as chunks:
        async for chunk in chunks:
            chunk.raise_if_failed()
            is_finished = chunk.finish_reason is not None
            yield chunk
    if not is_finished:
        raise Dsv4Error(f"{request.request_id}: the token stream ended without a finish reason")


async def copy_chunks(
    service: GenerationService, request: GenerationRequest, prompt_computed: asyncio.Event, *, is_first: bool
) -> AsyncGenerator[TokenChunk, None]:
    """`token_chunks` of one of several answers to a prompt. The first one announces the prompt by its first token; the
    others start then, when its pages can be shared, or at once when the prompt is too short for that.

    The wait is bounded by the time limit of the first one's stream, whose failure ends all of them.
    """
    if not is_first and can_share(request):
        await prompt_computed.wait()
    async with aclosing(token_chunks(service, request)) as chunks:
        async for chunk in chunks:
            prompt_computed.set()
            yield chunk
