"""The graph with engines that say one word per step on a fixed beat: what is left to measure is everything around them.

The router, its HTTP front end, the handles, the subscriptions and the fan-out are the real ones. `dsv4 bench overhead`
runs it; nothing else does.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from ray import serve
from ray.serve import Application

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.cluster_config import ClusterConfig
from dsv4_cluster.protocol.handoff import DecodeRequest, KVTicket, PrefillResult
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.routing import ReplicaSnapshot
from dsv4_cluster.protocol.stats import EngineStats
from dsv4_cluster.serve.app import router_deployment, router_spec
from dsv4_cluster.serve.names import DECODE, PREFILL
from dsv4_cluster.serve.request_router import check_pin, own_replica_id, pinned_router_config
from dsv4_cluster.tokenizer.text import TextTokenizer
from dsv4_cluster.worker.stream import Message, StepFanout

WORD = " the"  # one token of the V4 vocabulary, and of every vocabulary that the test checkpoints carry
LAYOUT_ID = "scripted"
_MAX_ONGOING = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEngine:
    """What the engine plays. Its token k of a request is spoken k steps after the request's first step."""

    checkpoint_dir: str  # for its tokenizer
    steps_per_s: float


class ScriptedPrefill:
    """A prefill replica that computes nothing: the first word is there at once."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._token_id = _word_id(engine)

    async def prefill(self, request: GenerationRequest, *, epoch: int, replica_id: str) -> PrefillResult:
        """The first word and a ticket for no bytes."""
        check_pin(replica_id)
        ticket = KVTicket(
            ticket_id=f"{request.request_id}/{epoch}",
            request_id=request.request_id,
            epoch=epoch,
            backend="shm",
            endpoints=(),
            layout_id=LAYOUT_ID,
            num_tokens=len(request.prompt_token_ids),
            segments=(),
            expires_at_s=time.monotonic() + 60.0,
        )
        return PrefillResult(
            request_id=request.request_id,
            first_chunk=TokenChunk(request_id=request.request_id, token_ids=(self._token_id,)),
            ticket=ticket,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    async def abort(self, request_id: str, *, replica_id: str) -> None:
        """Nothing runs here."""

    async def release(self, ticket: KVTicket) -> None:
        """Nothing was published."""

    async def snapshot(self) -> ReplicaSnapshot:
        """An idle replica."""
        return _snapshot("prefill", 0)


class ScriptedDecode:
    """A decode replica whose engine steps on the beat and writes down when."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._token_id = _word_id(engine)
        self._period_s = 1.0 / engine.steps_per_s
        self._left: dict[str, int] = {}  # tokens to come, by request
        self._first_steps: dict[str, int] = {}
        self._step_times_s: list[float] = []
        self._fanout = StepFanout(self._forget, MonotonicClock())
        self._beat = asyncio.get_running_loop().create_task(self._run())

    async def subscribe(self, router_id: str, *, replica_id: str) -> AsyncIterator[Message]:
        """See DecodeDeployment.subscribe."""
        check_pin(replica_id)
        async with aclosing(self._fanout.subscribe(router_id)) as messages:
            async for message in messages:
                yield message

    async def admit(self, request: DecodeRequest, *, router_id: str, replica_id: str) -> None:
        """Speak from the next step on."""
        check_pin(replica_id)
        request_id = request.request.request_id
        self._fanout.register(request_id, router_id)
        self._left[request_id] = request.request.sampling.max_tokens - 1  # the first one was prefill's
        self._first_steps[request_id] = len(self._step_times_s)

    async def abort(self, request_id: str, *, replica_id: str) -> None:
        """Fall silent."""
        check_pin(replica_id)
        self._fanout.forget(request_id)
        self._forget(request_id)

    async def unsubscribe(self, router_id: str, *, replica_id: str) -> None:
        """See DecodeDeployment.unsubscribe."""
        check_pin(replica_id)
        self._fanout.unsubscribe(router_id)

    async def snapshot(self, router_id: str) -> ReplicaSnapshot:
        """Load of the replica; also the router's sign of life."""
        self._fanout.hear(router_id)
        return _snapshot("decode", len(self._left))

    async def spoken(self) -> tuple[dict[str, int], list[float]]:
        """(first step of every request by id, CLOCK_MONOTONIC seconds of every step)."""
        return self._first_steps, self._step_times_s

    async def _run(self) -> None:
        started_s = time.monotonic()
        step = 0
        while True:
            step += 1
            await asyncio.sleep(max(0.0, started_s + step * self._period_s - time.monotonic()))
            self._step_times_s.append(time.monotonic())
            self._fanout.publish([self._next(request_id) for request_id in list(self._left)])

    def _next(self, request_id: str) -> TokenChunk:
        self._left[request_id] -= 1
        is_last = self._left[request_id] <= 0
        if is_last:
            self._forget(request_id)
        reason = FinishReason.LENGTH if is_last else None
        return TokenChunk(request_id=request_id, token_ids=(self._token_id,), finish_reason=reason)

    def _forget(self, request_id: str) -> None:
        self._left.pop(request_id, None)


def build_scripted(config: ClusterConfig, steps_per_s: float) -> Application:
    """The graph of a config with scripted engines, one replica of each role."""
    engine = ScriptedEngine(checkpoint_dir=config.model.path, steps_per_s=steps_per_s)
    prefill, decode = _scripted(ScriptedPrefill, PREFILL, engine), _scripted(ScriptedDecode, DECODE, engine)
    return router_deployment(config).bind(router_spec(config), prefill, decode, None)


def _scripted(cls: type, name: str, engine: ScriptedEngine) -> Application:
    return (
        serve.deployment(name=name)(cls)
        .options(
            ray_actor_options={"num_cpus": 0.1},
            max_ongoing_requests=_MAX_ONGOING,
            request_router_config=pinned_router_config(),
        )
        .bind(engine)
    )


def _word_id(engine: ScriptedEngine) -> int:
    (token_id,) = TextTokenizer.from_checkpoint(engine.checkpoint_dir).encode(WORD)
    return token_id


def _snapshot(role: str, num_running: int) -> ReplicaSnapshot:
    stats = EngineStats(
        num_running=num_running,
        num_waiting=0,
        num_waiting_tokens=0,
        num_held=0,
        free_pages=1,
        num_pages=1,
        num_preemptions=0,
        total_prompt_tokens=0,
        total_generated_tokens=0,
        num_steps=0,
        last_step_ms=0.0,
    )
    return ReplicaSnapshot(replica_id=own_replica_id(), role=role, node_id="", layout_id=LAYOUT_ID, stats=stats)
