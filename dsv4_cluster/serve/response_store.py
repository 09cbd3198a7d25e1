"""One response store for several routers: a deployment with one replica, and the routers' way to it.

A single router keeps its responses in its own process. With several, the next request of a client may reach another
one, so that what has to be found again lies beside them. It lies in memory: a restart of that process forgets it.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.serve.handle import DeploymentHandle

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.responses_config import ResponsesConfig
from dsv4_cluster.frontend.response_store import LocalResponseStore
from dsv4_cluster.protocol.stored_response import StoredResponse
from dsv4_cluster.serve.errors import call_error

CALL_TIMEOUT_S = 5.0
T = TypeVar("T")


class ResponseStoreDeployment:
    """The replica: a LocalResponseStore behind calls of the same names."""

    async def __init__(self, config: ResponsesConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._store = LocalResponseStore(config, MonotonicClock())

    async def add(self, record: StoredResponse) -> None:
        """See ResponseStore."""
        await self._store.add(record)

    async def replace(self, record: StoredResponse) -> bool:
        """See ResponseStore."""
        return await self._store.replace(record)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        return await self._store.get(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        return await self._store.delete(tenant, response_id)

    async def wait_until_over(self, tenant: str, response_id: str, timeout_s: float) -> bool:
        """See ResponseStore."""
        return await self._store.wait_until_over(tenant, response_id, timeout_s)


class SharedResponseStore:
    """ResponseStore over the deployment's handle. Every call raises WorkerLostError when the replica is not there."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def add(self, record: StoredResponse) -> None:
        """See ResponseStore."""
        await _called(self._handle.add.remote(record))

    async def replace(self, record: StoredResponse) -> bool:
        """See ResponseStore."""
        return await _called(self._handle.replace.remote(record))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        return await _called(self._handle.get.remote(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """See ResponseStore."""
        return await _called(self._handle.delete.remote(tenant, response_id))

    async def wait_until_over(self, tenant: str, response_id: str, timeout_s: float) -> bool:
        """See ResponseStore."""
        call = self._handle.wait_until_over.remote(tenant, response_id, timeout_s)
        return await _called(call, timeout_s + CALL_TIMEOUT_S)


async def _called(call: Awaitable[T], timeout_s: float = CALL_TIMEOUT_S) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except Exception as err:
        raise call_error(err) from err
