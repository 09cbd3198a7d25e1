"""The router's clients in the test's own process, talking to a running cluster."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ray import serve

from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.protocol.handoff import DecodeRequest
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.services import DecodeClient
from dsv4_cluster.router.orchestrator import Orchestrator
from dsv4_cluster.serve.clients import ServeDecodeClient, ServePrefillClient
from dsv4_cluster.serve.directory import ReplicaDirectory
from dsv4_cluster.serve.request_router import poll_snapshots
from tests.kit.cluster import APP

Tamper = Callable[[DecodeRequest], DecodeRequest]


@dataclass(frozen=True, slots=True)
class RouterSide:
    """Clients as a router has them."""

    prefill: ServePrefillClient
    decode: ServeDecodeClient
    decode_replicas: ReplicaDirectory

    def orchestrator(self, decode: DecodeClient) -> Orchestrator:
        """An orchestrator over these clients, with another decode client if wanted."""

        async def nothing_missing() -> list[str]:
            return []

        return Orchestrator(
            self.prefill, decode, RouterConfig(), model_names=("toy",), max_model_len=4096, probe=nothing_missing
        )


@asynccontextmanager
async def router_side(router_id: str) -> AsyncIterator[RouterSide]:
    """Clients for the length of the block; the subscription ends with it."""
    prefill, decode = (serve.get_deployment_handle(name, APP) for name in ("Prefill", "Decode"))
    prefills = ReplicaDirectory("prefill", lambda: poll_snapshots(prefill))
    decodes = ReplicaDirectory("decode", lambda: poll_snapshots(decode, router_id))
    client = ServeDecodeClient(decode, decodes, router_id=router_id)
    try:
        yield RouterSide(ServePrefillClient(prefill, prefills, decodes), client, decodes)
    finally:
        await client.close()


class TamperedDecode:
    """A decode client that spoils what the first attempt hands over."""

    def __init__(self, decode: DecodeClient, tamper: Tamper) -> None:
        self._decode = decode
        self._tamper = tamper
        self.epochs: list[int] = []

    async def decode(self, request: DecodeRequest) -> AsyncIterator[TokenChunk]:
        self.epochs.append(request.epoch)
        spoilt = self._tamper(request) if request.epoch == 0 else request
        async for chunk in self._decode.decode(spoilt):
            yield chunk
