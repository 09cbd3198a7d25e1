"""From settings to a transport; the only place that knows all backends."""

from collections.abc import Callable

from dsv4_cluster.clock import Clock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.transfer.base import KVTransport
from dsv4_cluster.transfer.lease import LeaseTable
from dsv4_cluster.transfer.staged import PeerLink, StagedTransport


def create_transport(config: TransferConfig, *, clock: Clock, advertise_host: str | None = None) -> KVTransport:
    """Build the configured backend, ready to publish and fetch. The caller closes it.

    advertise_host: this node's address, named in tickets when `bind_host` is a wildcard and the settings name no
        other. Unused by `local`.
    Raises: ConfigError when `bind_host` cannot be listened on, or is a wildcard and no address is known.
    """
    return StagedTransport(config, clock, backend=config.backend, connect=_connector(config, advertise_host))


def _connector(config: TransferConfig, advertise_host: str | None) -> Callable[[LeaseTable], PeerLink]:
    match config.backend:
        case "local":
            from dsv4_cluster.transfer.local import LocalLink

            return LocalLink
        case "shm":
            from dsv4_cluster.transfer.shm import ShmLink

            return lambda leases: ShmLink(leases, config, advertise_host=advertise_host)
        case "grpc":
            from dsv4_cluster.transfer.grpc import GrpcLink

            return lambda leases: GrpcLink(leases, config, advertise_host=advertise_host)
