"""The way from prefill to decode in a live cluster: one message per step, and damage means computing again."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from dsv4_cluster import SamplingParams
from dsv4_cluster.ids import new_request_id
from dsv4_cluster.protocol import request as protocol
from dsv4_cluster.protocol.handoff import DecodeRequest
from dsv4_cluster.protocol.output import FinishReason, TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.serve.request_router import open_subscription
from tests.kit.router_side import TamperedDecode, router_side

pytestmark = pytest.mark.ray

PROMPT = tuple(range(5, 205))
NUM_TOKENS = 12


def new_request(num_tokens: int = NUM_TOKENS, *, seed: int = 3) -> GenerationRequest:
    return GenerationRequest(
        request_id=new_request_id("test"),
        prompt_token_ids=PROMPT,
        sampling=protocol.SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed),
        stop=protocol.StopParams(ignore_eos=True),
    )


def wrong_checksum(request: DecodeRequest) -> DecodeRequest:
    """What the receiver sees when a byte flipped on the way."""
    first, *others = request.ticket.segments
    segments = (replace(first, checksum=first.checksum ^ 1), *others)
    return replace(request, ticket=replace(request.ticket, segments=segments))


def unknown_lease(request: DecodeRequest) -> DecodeRequest:
    """What the receiver sees when the lease has expired."""
    return replace(request, ticket=replace(request.ticket, ticket_id="expired"))


def stale_epoch(request: DecodeRequest) -> DecodeRequest:
    """The ticket of another attempt."""
    return replace(request, ticket=replace(request.ticket, epoch=7))


@pytest.mark.parametrize("tamper", [wrong_checksum, unknown_lease, stale_epoch])
def test_a_damaged_handoff_is_computed_again_without_a_lost_or_doubled_token(cluster, offline_llm, tamper):
    tokens, epochs = asyncio.run(generate_with(tamper))

    assert epochs == [0, 1]
    assert tokens == expected_tokens(offline_llm)


def test_a_prefill_worker_that_dies_before_the_fetch_is_replaced_and_the_prompt_computed_again(cluster, offline_llm):
    (worker,) = cluster.workers("Prefill")

    def kill_publisher(request: DecodeRequest) -> DecodeRequest:
        os.kill(worker.pid, signal.SIGKILL)
        return request

    tokens, epochs = asyncio.run(generate_with(kill_publisher))

    assert epochs[0] == 0
    assert tokens == expected_tokens(offline_llm)
    assert cluster.workers("Prefill")[0].pid != worker.pid


def test_tokens_come_in_one_message_per_engine_step(cluster):
    num_requests, num_tokens = 6, 20

    messages = asyncio.run(messages_of(num_requests, num_tokens))

    chunks = [chunk for message in messages for chunk in message]
    assert sum(chunk.finish_reason is FinishReason.LENGTH for chunk in chunks) == num_requests
    assert len(chunks) == num_requests * (num_tokens - 1)  # the first token of each came from prefill
    # Were every token a message of its own, there would be as many messages as chunks.
    assert len(messages) <= len(chunks) / 2
    most_per_message = max(len({chunk.request_id for chunk in message}) for message in messages)
    assert most_per_message == num_requests


async def generate_with(tamper) -> tuple[list[int], list[int]]:
    """(tokens of one answer, epochs that reached decode)."""
    async with router_side("test-handoff") as side:
        decode = TamperedDecode(side.decode, tamper)
        orchestrator = side.orchestrator(decode)
        tokens = [token async for chunk in orchestrator.generate(new_request()) for token in chunk.token_ids]
        await orchestrator.close()
    return tokens, decode.epochs


def expected_tokens(llm) -> list[int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3, ignore_eos=True)
    return llm.generate(prompt_token_ids=PROMPT, sampling_params=params)[0].token_ids


async def messages_of(num_requests: int, num_tokens: int) -> list[list[TokenChunk]]:
    """Every message a router gets while several requests decode together."""
    router_id = "test-messages"
    async with router_side(router_id) as side:
        requests = [new_request(num_tokens, seed=seed) for seed in range(num_requests)]
        results = await asyncio.gather(*[side.prefill.prefill(request, epoch=0) for request in requests])
        replica_id = (await side.decode_replicas.pick()).replica_id
        handle = side.decode._handle
        stream, cancel = open_subscription(handle, router_id, replica_id=replica_id)
        assert await anext(stream) == []
        handoffs = [
            DecodeRequest(request=r, first_token_id=p.first_chunk.token_ids[0], epoch=0, ticket=p.ticket)
            for r, p in zip(requests, results, strict=True)
        ]
        admissions = [handle.admit.remote(h, router_id=router_id, replica_id=replica_id) for h in handoffs]
        messages, num_finished = [], 0
        while num_finished < num_requests:
            messages.append(await anext(stream))
            num_finished += sum(chunk.finish_reason is not None for chunk in messages[-1])
        await asyncio.gather(*admissions)
        await handle.unsubscribe.remote(router_id, replica_id=replica_id)
        cancel()
    return messages
