"""Fairness between the end users of one key: over HTTP, with a real engine that has fewer places than requests."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

import httpx
import pytest

from dsv4_cluster.config.api_config import ApiConfig, ApiKey
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.frontend.auth import hash_key, new_key
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.tokenizer.encoding import ModelCodec
from dsv4_cluster.tokenizer.models import ServedModels
from dsv4_cluster.worker.loop import EngineLoop, LoopCallbacks
from tests.kit.http_server import serving

MODEL = "toy"
KEY = new_key()
NUM_PLACES, NUM_MANY, NUM_TOKENS = 2, 16, 12
MOST_AHEAD = 5  # answers: those under way, and one or two turns; without turns it would be nearly all of the flood


class LoopService:
    """An engine in its own thread, as a worker runs it."""

    def __init__(self, core: EngineCore) -> None:
        self._streams: dict[str, asyncio.Queue[TokenChunk]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.num_asked = 0
        self.loop = EngineLoop(
            core,
            LoopCallbacks(
                on_chunks=self._hand_out, on_step=lambda: None, on_failure=lambda _: None, housekeeping=lambda: None
            ),
        )
        self.loop.start()

    def _hand_out(self, chunks: Sequence[TokenChunk]) -> None:
        assert self._event_loop is not None
        for chunk in chunks:
            self._event_loop.call_soon_threadsafe(self._streams[chunk.request_id].put_nowait, chunk)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        self._event_loop = asyncio.get_running_loop()
        stream = self._streams[request.request_id] = asyncio.Queue()
        await asyncio.wrap_future(self.loop.submit(lambda core: core.add(request)))
        self.num_asked += 1
        is_over = False
        while not is_over:
            chunk = await stream.get()
            is_over = chunk.finish_reason is not None
            yield chunk

    def model_names(self) -> Sequence[str]:
        return (MODEL,)

    async def unready_reasons(self) -> Sequence[str]:
        return ()


@pytest.fixture
def server(toy_dir) -> Iterator[tuple[LoopService, str]]:
    """A router with one key over the toy model."""
    core = EngineCore.from_checkpoint(
        toy_dir, EngineConfig(dtype="float32", max_num_seqs=NUM_PLACES), KVConfig(num_pages=32), SpeculationConfig()
    )
    service = LoopService(core)
    codec = ModelCodec.from_checkpoint(toy_dir, ServedModels.of((MODEL,)))
    config = RouterConfig(api=ApiConfig(keys=[ApiKey(name="alice", sha256=hash_key(KEY))]))
    with contextlib.ExitStack() as stack:
        stack.callback(service.loop.stop, 10.0)
        yield (
            service,
            stack.enter_context(serving(create_app(service, codec, config, max_model_len=core.max_model_len))),
        )
    core.check()
    assert not core.has_work()


@pytest.mark.parametrize("field", ["user_id", "metadata", "safety_identifier"])
def test_a_flood_of_one_end_user_does_not_hold_up_another_of_the_same_key(server, field):
    service, url = server
    path = {"user_id": "/v1/completions", "metadata": "/v1/messages", "safety_identifier": "/v1/responses"}[field]
    sampling = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    body = {
        "user_id": {"prompt": "go on", "max_tokens": NUM_TOKENS},
        "metadata": {"messages": [{"role": "user", "content": "go on"}], "max_tokens": NUM_TOKENS},
        "safety_identifier": {"input": "go on", "max_output_tokens": NUM_TOKENS},
    }[field] | sampling

    async def run() -> int:
        finished: list[str] = []
        headers = {"authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=NUM_MANY + 1)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as client:

            async def ask(user: str) -> None:
                answer = await client.post(
                    path, json={**body, field: {"user_id": user} if field == "metadata" else user}
                )
                assert answer.status_code == 200, answer.text
                finished.append(user)

            flood = [asyncio.ensure_future(ask("many")) for _ in range(NUM_MANY)]
            while service.num_asked < NUM_MANY:
                await asyncio.sleep(0.005)
            num_before = len(finished)
            await ask("few")
            num_ahead = len(finished) - 1 - num_before
            await asyncio.gather(*flood)
        assert num_before < NUM_MANY - 2 * MOST_AHEAD, "the flood was over before it mattered"
        return num_ahead

    assert asyncio.run(run()) <= MOST_AHEAD
