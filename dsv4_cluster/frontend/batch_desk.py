"""What the endpoints of files and batches share."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsv4_cluster.batches.batch_store import BatchStore
from dsv4_cluster.batches.file_store import FileStore
from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.frontend.auth import Keyring
from dsv4_cluster.frontend.batch_runner import BatchRunner
from dsv4_cluster.frontend.caller import Caller
from dsv4_cluster.frontend.direct_call import DirectCalls
from dsv4_cluster.metrics.batch_metrics import BatchMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDesk:
    """Built once per app that has a directory for batches."""

    files: FileStore
    batches: BatchStore
    runner: BatchRunner
    config: BatchesConfig
    ignores_unknown: bool
    max_body_bytes: int


def open_desk(
    config: RouterConfig,
    calls: DirectCalls,
    keyring: Keyring,
    *,
    is_draining: Callable[[], bool],
    metrics: BatchMetrics,
) -> BatchDesk | None:
    """None without `router.batches.dir`. Raises: ConfigError when the directory cannot be made."""
    if config.batches.dir is None:
        return None
    root = Path(config.batches.dir)

    def caller_of(key_name: str, tenant: str) -> Caller | None:
        owner = keyring.owner(key_name, tenant)
        return owner and dataclasses.replace(owner, priority=owner.priority + config.batches.priority)

    try:
        files = FileStore(root, config.batches)
        batches = BatchStore(root, files, config.batches)
    except OSError as err:
        raise ConfigError(f"router.batches.dir: {err}") from err
    return BatchDesk(
        files=files,
        batches=batches,
        runner=BatchRunner(batches, config, calls, caller_of=caller_of, is_draining=is_draining, metrics=metrics),
        config=config.batches,
        ignores_unknown=config.api.unknown_fields == "ignore",
        max_body_bytes=config.max_body_bytes,
    )
