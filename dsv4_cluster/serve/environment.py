"""The process environment: Ray's own settings that this application needs. Nothing else reads environment variables.

Serve reads them when it is imported, in every process, so they belong in the environment of the whole cluster
(`launch/` files, `ray start`, pod specs) and cannot be set by the application itself.
"""

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger(__name__)

# Without it a token stream of 64 sequences reaches about 2.5k tokens/s on two cores, with it about 47k.
REQUIRED_SETTINGS: dict[str, str] = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}

# For one machine without a load balancer; launch/environment.sh holds the same values and says why.
SINGLE_MACHINE_SETTINGS: dict[str, str] = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "dsv4_cluster.serve.proxy_headers:middlewares",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_ADDRESS": "local",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def missing_settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return `NAME=value` of every required setting that the environment lacks."""
    present = os.environ if environ is None else environ
    return [f"{name}={value}" for name, value in REQUIRED_SETTINGS.items() if present.get(name) != value]


def warn_of_missing_settings() -> None:
    """Log one warning when this process runs without the throughput settings."""
    missing = missing_settings()
    if missing:
        logger.warning("token streams will be slow: set %s for every Ray process, see launch/", " ".join(missing))


def prepare_single_machine(*, ray_temp_dir: str, replica_port: int | None = None) -> None:
    """Set up this process for a Ray instance of its own, before Ray is imported. Mutates: os.environ.

    replica_port: where the one router replica listens itself, as behind a load balancer; None = Serve's proxy listens.
    """
    os.environ.update(REQUIRED_SETTINGS | SINGLE_MACHINE_SETTINGS | {"RAY_TMPDIR": ray_temp_dir})
    if replica_port is not None:
        os.environ.update(
            {
                "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
                "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replica_port),
                "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replica_port + 1),
            }
        )
