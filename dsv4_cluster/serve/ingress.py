"""The router deployment: HTTP front end and orchestrator in one process, without torch."""

import asyncio
import logging
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from dsv4_cluster.config.cluster_config import ServedModel
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.limits import shortest_max_model_len
from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.config.system_fingerprint import system_fingerprint
from dsv4_cluster.frontend.app import create_app
from dsv4_cluster.frontend.batch_runner import BatchRunner
from dsv4_cluster.metrics.page import merged_text, registry_text
from dsv4_cluster.router.orchestrator import Orchestrator
from dsv4_cluster.serve.clients import ServeDecodeClient, ServePrefillClient
from dsv4_cluster.serve.directory import ReplicaDirectory, missing_replicas
from dsv4_cluster.serve.environment import warn_of_missing_settings
from dsv4_cluster.serve.process_facts import ProcessFacts, process_facts
from dsv4_cluster.serve.request_router import own_replica_id, poll_routers, poll_snapshots
from dsv4_cluster.serve.response_store import SharedResponseStore
from dsv4_cluster.tokenizer.encoding import ModelCodec
from dsv4_cluster.tokenizer.models import ServedModels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """What a router is told: its own settings, and the engines that its requests pass through."""

    model: ServedModel
    router: RouterConfig
    engines: tuple[tuple[EngineConfig, KVConfig], ...]


@serve.ingress()
class RouterIngress:
    """One router replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        spec: RouterSpec,
        prefill: DeploymentHandle,
        decode: DeploymentHandle,
        responses: DeploymentHandle | None,
    ) -> None:
        warn_of_missing_settings()
        router_id = own_replica_id()
        self._router_id = router_id
        self._registry = CollectorRegistry()
        self._config = spec.router
        self._codec = ModelCodec.from_checkpoint(spec.model.path, ServedModels.of(spec.model.served_names))
        self._max_model_len = shortest_max_model_len(ModelConfig.from_checkpoint(spec.model.path), spec.engines)
        self._fingerprint = system_fingerprint(spec.model.path, spec.engines)
        self._prefills = ReplicaDirectory("prefill", lambda: poll_snapshots(prefill))
        self._decodes = ReplicaDirectory("decode", lambda: poll_snapshots(decode, router_id))
        self._responses = None if responses is None else SharedResponseStore(responses)
        self._decode_client = ServeDecodeClient(decode, self._decodes, router_id=router_id)
        self._orchestrator = Orchestrator(
            ServePrefillClient(prefill, self._prefills, self._decodes),
            self._decode_client,
            spec.router,
            model_names=spec.model.served_names,
            max_model_len=self._max_model_len,
            probe=self._missing_replicas,
        )
        self._tasks = [
            asyncio.get_running_loop().create_task(self._prefills.run(lambda: None)),
            asyncio.get_running_loop().create_task(self._decodes.run(self._decode_client.end_idle_streams)),
        ]

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this after the constructor."""
        app = create_app(
            self._orchestrator,
            self._codec,
            self._config,
            max_model_len=self._max_model_len,
            system_fingerprint=self._fingerprint,
            responses=self._responses,
            registry=self._registry,
            metrics_page=self._metrics_page,
        )
        self._gate = app.state.gate
        self._batch_runner: BatchRunner | None = app.state.batch_runner
        return app

    async def own_metrics(self) -> tuple[str, str]:
        """(router id, what this router counts in Prometheus's text format)."""
        return self._router_id, registry_text(self._registry)

    async def drain(self) -> int:
        """Take no new requests from here on. Returns: how many are under way."""
        self._gate.is_draining = True
        return self._gate.num_in_flight

    async def _metrics_page(self) -> str:
        """All routers that answer in time, and the replicas as this one knows them."""
        pages = dict(await poll_routers())
        for role in (self._prefills, self._decodes):
            if not role.snapshots():  # a router that has just come up may be asked before its first poll
                await role.refresh()
        pages[self._router_id] = registry_text(self._registry)
        return merged_text(pages, [*self._prefills.snapshots(), *self._decodes.snapshots()])

    async def check_health(self) -> None:
        """Raises: RuntimeError when a poll has ended: this router would never see a new replica, or a new batch."""
        ended = [task for task in self._tasks if task.done()]
        if ended:
            raise RuntimeError(f"{len(ended)} replica polls have ended: {ended}")
        if self._batch_runner is not None and self._batch_runner.has_ended:
            raise RuntimeError("the task that takes batches has ended")

    async def process_facts(self) -> ProcessFacts:
        """See serve/process_facts.py."""
        return process_facts()

    async def _missing_replicas(self) -> list[str]:
        return missing_replicas(self._prefills, self._decodes)

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._decode_client.close()
        await self._orchestrator.close()
