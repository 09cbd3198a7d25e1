"""Fairness between the end users of one key: over HTTP, with a real engine that has fewer places than requests."""

import asyncio
import contextlib
import threading
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
NUM_PLACES, NUM_MANY, NUM_TOKENS = 2, 12, 8
MOST_AHEAD = 3  # answers: those of the first turns; in the order of their coming it would be all of the flood
WAIT_S = 30.0


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
        added = self.loop.submit(lambda core: core.add(request))
        self.num_asked += 1
        await asyncio.wrap_future(added)
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


OFF = {"thinking": {"type": "disabled"}}


def body_of(path: str, user: str, text: str) -> dict:
    """A request of an end user."""
    fields = {
        "/v1/completions": {"prompt": text, "user_id": user},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "user_id": user, **OFF},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "metadata": {"user_id": user}, **OFF},
        "/v1/responses": {"input": text, "safety_identifier": user, "reasoning": {"effort": "none"}},
    }[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {"model": MODEL, "temperature": 0, "ignore_eos": True, limit: NUM_TOKENS, **fields}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_flood_of_one_end_user_does_not_hold_up_another_of_the_same_key(server, path):
    service, url = server

    async def run() -> int:
        finished: list[str] = []
        headers = {"authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=NUM_MANY + 1)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as client:

            async def ask(user: str, text: str) -> None:
                answer = await client.post(path, json=body_of(path, user, text))
                assert answer.status_code == 200, answer.text
                finished.append(user)

            async def until_asked(num_requests: int) -> None:
                while service.num_asked < num_requests:
                    await asyncio.sleep(0.005)

            may_begin = threading.Event()
            service.loop.submit(lambda _: may_begin.wait(WAIT_S))
            flood = [asyncio.ensure_future(ask("many", f"{i} go on")) for i in range(NUM_MANY)]
            await until_asked(NUM_MANY)
            late = asyncio.ensure_future(ask("few", "go on"))
            await until_asked(NUM_MANY + 1)
            may_begin.set()
            await late
            num_ahead = len(finished) - 1
            await asyncio.gather(*flood)
        return num_ahead

    assert asyncio.run(run()) <= MOST_AHEAD
