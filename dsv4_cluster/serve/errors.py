"""Turn what a Serve call raises into our typed errors."""

from ray.serve.exceptions import RayServeException

from dsv4_cluster.errors import Dsv4Error, WorkerLostError
from dsv4_cluster.worker.remote_errors import typed_error


def call_error(err: BaseException) -> Dsv4Error:
    """Return the typed error of a failed call to a replica; trouble of Serve itself is a retryable WorkerLostError."""
    if isinstance(err, RayServeException | TimeoutError):
        return WorkerLostError(f"replica unavailable: {type(err).__name__}: {err}")
    return typed_error(err, where="replica")
