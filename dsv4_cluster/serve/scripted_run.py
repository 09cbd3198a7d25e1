"""Start Ray and the scripted graph for the length of a block; what `dsv4 bench overhead` measures."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import ray
from ray import serve

from dsv4_cluster.config.cluster_config import ClusterConfig
from dsv4_cluster.serve.names import DECODE
from dsv4_cluster.serve.scripted import build_scripted

APP = "scripted"
OBJECT_STORE_BYTES = 100 << 20
Spoken = tuple[dict[str, int], list[float]]  # see ScriptedDecode.spoken


@asynccontextmanager
async def scripted_cluster(
    config: ClusterConfig, *, steps_per_s: float, port: int | None
) -> AsyncIterator[Callable[[], Awaitable[Spoken]]]:
    """Yields a function that asks the engine what it spoke and when. The environment has been prepared.

    port: of Serve's proxy; None = the router replica listens itself.
    """
    ray.init(
        include_dashboard=False,
        namespace="serve",
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        configure_logging=False,
    )
    try:
        location = "Disabled" if port is None else "HeadOnly"
        serve.start(proxy_location=location, http_options={"host": "127.0.0.1", "port": port or 0})
        serve.run(build_scripted(config, steps_per_s), name=APP, route_prefix="/", blocking=False)
        decode = serve.get_deployment_handle(DECODE, APP)

        async def spoken() -> Spoken:
            return await decode.spoken.remote()  # type: ignore[no-any-return]

        yield spoken
        await serve.shutdown_async()
    finally:
        ray.shutdown()
