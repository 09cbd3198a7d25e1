"""Turn what Ray raises into our own typed errors, so that nothing above this room knows Ray's wrappers."""

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from dsv4_cluster.errors import Dsv4Error, WorkerLostError


def typed_error(err: BaseException, *, where: str) -> Dsv4Error:
    """Return the typed error behind `err`, as it was raised at the other end.

    where: names the far side for the message, such as "decode worker". An actor that died or a call that was cancelled
    becomes a retryable WorkerLostError; anything unexpected becomes a plain Dsv4Error (500) with its type and text.
    """
    cause: BaseException = err
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    if isinstance(cause, Dsv4Error):
        return cause
    if isinstance(cause, RayActorError | TaskCancelledError):
        return WorkerLostError(f"{where} is gone: {type(cause).__name__}")
    return Dsv4Error(f"{where} failed: {type(cause).__name__}: {cause}")
