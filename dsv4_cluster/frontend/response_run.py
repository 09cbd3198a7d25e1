"""Generating one response: its named events, whole or in the background, and what of it is kept."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import deepseek_recipe as recipe

from dsv4_cluster.errors import Dsv4Error
from dsv4_cluster.frontend.error_body import describe
from dsv4_cluster.frontend.generation import Backend
from dsv4_cluster.frontend.response_object import FINAL_EVENTS, counted, dumps, failed
from dsv4_cluster.frontend.sse import NamedEvent
from dsv4_cluster.frontend.turn import Turn, parsed_events
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.stored_response import StoredResponse
from dsv4_cluster.tokenizer.chat_output import ChatParser
from dsv4_cluster.tokenizer.family import Event

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 10.0  # of asking the store again whether somebody has cancelled; it answers at once when somebody does
_WITH_RESPONSE = FINAL_EVENTS | {"response.created", "response.in_progress"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseJob:
    """One checked and encoded request.

    items: all input items, JSON. echo: fields of the response object that repeat the request.
    """

    turn: Turn
    items: str
    echo: dict[str, Any]
    tenant: str
    is_stored: bool


class ResponseRun:
    """One response under way."""

    def __init__(self, job: ResponseJob, generation: GenerationRequest, backend: Backend) -> None:
        self._job = job
        self._generation = generation
        self._backend = backend
        self._parser = ChatParser(
            backend.codec.chat,
            job.turn.prompt,
            response_id=generation.request_id,
            eos_token_id=backend.codec.text.eos_token_id,
        )
        self._latest = self._skeleton()
        self._num_events = 0

    @property
    def response(self) -> dict[str, Any]:
        """The response object in its latest state."""
        return self._latest

    async def stream(self) -> AsyncGenerator[Sequence[NamedEvent], None]:
        """The events of every chunk. A finished response is kept before the client hears of its end."""
        async with aclosing(parsed_events(self._parser, self._generation, self._backend)) as groups:
            async for events in groups:
                named = [self._named(event) for event in events]
                if self._job.is_stored and any(event.name in FINAL_EVENTS for event in named):
                    await self._keep()
                yield named

    def failure(self, err: Exception, request_id: str) -> Sequence[NamedEvent]:
        """The last event of a stream that an error ends."""
        self._latest = failed(self._latest, describe(err, request_id))
        event = {"type": "response.failed", "sequence_number": self._num_events, "response": self._latest}
        return [NamedEvent("response.failed", dumps(event))]

    async def whole(self) -> str:
        """The response body."""
        async with aclosing(self.stream()) as groups:
            async for _ in groups:
                pass
        return dumps(self._latest)

    async def in_background(self, request_id: str) -> None:
        """Generate to the end, to an error or until somebody cancels or deletes the response, and keep the result."""
        work = asyncio.ensure_future(self._kept(request_id))
        watch = asyncio.ensure_future(self._over_elsewhere())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            watch.cancel()
            ended, _ = await asyncio.gather(work, watch, return_exceptions=True)
            if isinstance(ended, Exception):
                logger.warning("%s: the end is not kept", self._generation.request_id, exc_info=ended)

    def record(self, *, is_over: bool) -> StoredResponse:
        """The latest state, as the store keeps it."""
        return StoredResponse(
            response_id=self._generation.request_id,
            tenant=self._job.tenant,
            body=dumps(self._latest),
            items=self._job.items,
            is_over=is_over,
        )

    async def _keep(self) -> None:
        """Keep a finished response; its client gets it also when the store is full or away."""
        try:
            await self._backend.responses.add(self.record(is_over=True))
        except Dsv4Error as err:
            logger.warning("%s: the response is not kept: %s", self._generation.request_id, err)

    async def _kept(self, request_id: str) -> None:
        store = self._backend.responses
        try:
            async with aclosing(parsed_events(self._parser, self._generation, self._backend)) as groups:
                async for events in groups:
                    names = [self._named(event).name for event in events]
                    if "response.in_progress" in names:
                        await store.replace(self.record(is_over=False))
        except Exception as err:
            self._latest = failed(self._latest, describe(err, request_id))
        await store.replace(self.record(is_over=True))

    async def _over_elsewhere(self) -> None:
        tenant, response_id = self._job.tenant, self._generation.request_id
        while True:
            try:
                if await self._backend.responses.wait_until_over(tenant, response_id, WATCH_PERIOD_S):
                    return
            except Dsv4Error as err:
                logger.warning("%s: nobody can cancel it at the moment: %s", response_id, err)
                await asyncio.sleep(WATCH_PERIOD_S)

    def _named(self, event: Event) -> NamedEvent:
        name = recipe.ResponsesResponse.sse_event_name(cast(recipe.ResponsesStreamEvent, event)) or ""
        text = event.to_json()
        self._num_events += 1
        if name not in _WITH_RESPONSE:
            return NamedEvent(name, text)
        value = json.loads(text)
        value["response"].update(self._job.echo)
        parser = self._parser
        counted(value["response"], num_tokens=parser.num_tokens, num_thought_tokens=parser.num_thought_tokens)
        self._latest = value["response"]
        return NamedEvent(name, dumps(value))

    def _skeleton(self) -> dict[str, Any]:
        """The response object before anything is generated."""
        prompt, codec = self._job.turn.prompt, self._backend.codec.chat
        processor = recipe.StreamProcessor(
            prompt.generator(self._generation.request_id), prompt.parsing, codec.tokenizer
        )
        created = json.loads(processor.push(recipe.InferenceChunk.ready())[0].to_json())
        processor.close()
        return {**created["response"], **self._job.echo, "status": "queued"}
