"""Prefill and decode clients whose behaviour per attempt is written by the test, with books that have to close."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from dsv4_cluster.protocol.handoff import DecodeRequest, KVTicket, PrefillResult
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest, SamplingParams

HANG = "hang"
ANSWER = (11, 12, 13, 14, 1)  # what the model says: a function of request and seed, so the same on every attempt


def request(max_tokens: int = 5, num_prompt_tokens: int = 3) -> GenerationRequest:
    """A small request."""
    return GenerationRequest(
        request_id="req-1",
        prompt_token_ids=tuple(range(2, 2 + num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=5),
    )


def chunk(*token_ids: int) -> TokenChunk:
    """A chunk of the answer; EOS finishes it."""
    is_last = token_ids[-1:] == (1,)
    return TokenChunk(
        request_id="req-1",
        token_ids=token_ids,
        finish_reason=FinishReason.STOP if is_last else None,
        stop_token_id=1 if is_last else None,
    )


def ticket(epoch: int) -> KVTicket:
    """The lease that attempt `epoch` publishes."""
    return KVTicket(
        ticket_id=f"ticket-{epoch}",
        request_id="req-1",
        epoch=epoch,
        backend="local",
        endpoints=(),
        layout_id="layout",
        num_tokens=3,
        segments=(),
        expires_at_s=0.0,
    )


@dataclass
class ScriptedPrefill:
    """attempts[epoch]: an exception, HANG, or a first token id; beyond the list, the right first token."""

    attempts: Sequence[Exception | str | int] = ()
    is_release_stuck: bool = False
    epochs: list[int] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    num_aborted: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)

    async def prefill(self, request: GenerationRequest, *, epoch: int) -> PrefillResult:
        self.epochs.append(epoch)
        self.called.set()
        step = self.attempts[epoch] if epoch < len(self.attempts) else ANSWER[0]
        if isinstance(step, Exception):
            raise step
        if isinstance(step, str):
            try:
                await asyncio.Event().wait()
            finally:
                self.num_aborted += 1
        assert isinstance(step, int)
        lease = None if step == 1 else ticket(epoch)
        if lease is not None:
            self.published.append(lease.ticket_id)
        return PrefillResult(request_id=request.request_id, first_chunk=chunk(step), ticket=lease, num_prompt_tokens=3)

    async def release(self, ticket: KVTicket) -> None:
        if self.is_release_stuck:
            await asyncio.Event().wait()
        self.released.append(ticket.ticket_id)


@dataclass
class ScriptedDecode:
    """attempts[n]: the steps of the n-th decode call, chunks, exceptions or HANG; beyond the list, the whole rest.

    A call that yields takes the lease over, as a replica does after it has fetched.
    """

    attempts: Sequence[Sequence[TokenChunk | Exception | str]] = ()
    requests: list[DecodeRequest] = field(default_factory=list)
    taken_over: list[str] = field(default_factory=list)
    num_aborted: int = 0
    num_ended: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[TokenChunk, None]:
        number = len(self.requests)
        self.requests.append(request)
        self.called.set()
        steps = self.attempts[number] if number < len(self.attempts) else [chunk(t) for t in ANSWER[1:]]
        is_over = False
        try:
            for step in steps:
                if isinstance(step, Exception):
                    is_over = True
                    raise step
                if isinstance(step, str):
                    await asyncio.Event().wait()
                    continue
                if request.ticket.ticket_id not in self.taken_over:
                    self.taken_over.append(request.ticket.ticket_id)
                yield step
            is_over = True
        finally:
            self.num_ended += is_over
            self.num_aborted += not is_over
