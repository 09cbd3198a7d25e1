"""Every error a user or an operator can meet, each with its HTTP status and whether a retry can help.

All classes pickle with their attributes, because they cross Ray actor boundaries.
"""

from typing import Any


class Dsv4Error(Exception):
    """Base of all typed errors.

    message: says which field, which value and which limit.
    retryable: True when the same request may succeed on another try or another replica.
    http_status: the status the front end answers with.
    """

    http_status: int = 500
    retryable: bool = False

    def __init__(self, message: str, *, retryable: bool | None = None, http_status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        if retryable is not None:
            self.retryable = retryable
        if http_status is not None:
            self.http_status = http_status

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.retryable, self.http_status)


def _rebuild(cls: type[Dsv4Error], message: str, retryable: bool, http_status: int) -> Dsv4Error:
    return cls(message, retryable=retryable, http_status=http_status)


class InvalidRequestError(Dsv4Error):
    """The request breaks a documented rule."""

    http_status = 400


class PromptTooLongError(InvalidRequestError):
    """Prompt plus answer exceed the context or the cache, or the prompt's cache what may be handed over."""


class ModelNotFoundError(InvalidRequestError):
    """The named model is not served here."""

    http_status = 404


class AuthError(Dsv4Error):
    """No API key, or one that is not known."""

    http_status = 401


class OverloadedError(Dsv4Error):
    """A bounded queue is full or a quota is used up; try again later."""

    http_status = 429
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        retryable: bool | None = None,
        http_status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """retry_after_s: seconds until a retry can help, where that is known."""
        super().__init__(message, retryable=retryable, http_status=http_status)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_overloaded, (type(self), self.message, self.retryable, self.http_status, self.retry_after_s)


def _rebuild_overloaded(
    cls: type["OverloadedError"], message: str, retryable: bool, http_status: int, retry_after_s: float | None
) -> "OverloadedError":
    return cls(message, retryable=retryable, http_status=http_status, retry_after_s=retry_after_s)


class DrainingError(Dsv4Error):
    """This process finishes what it has and takes nothing new; another one will."""

    http_status = 503
    retryable = True


class DeadlineExceededError(Dsv4Error):
    """The request did not finish before its deadline."""

    http_status = 504


class ConfigError(Dsv4Error):
    """A configuration that cannot work, with the field and the reason."""


class CheckpointError(Dsv4Error):
    """A checkpoint that is missing, damaged, misshapen or of another model."""


class KVTransferError(Dsv4Error):
    """KV bytes could not be moved or did not verify; the request is recomputed."""

    http_status = 503
    retryable = True


class LeaseExpiredError(KVTransferError):
    """The ticket is unknown or its lease ran out."""


class StaleEpochError(KVTransferError):
    """The ticket belongs to another attempt or another request."""


class SegmentCorruptError(KVTransferError):
    """A segment has the wrong length or checksum."""


class LayoutMismatchError(KVTransferError):
    """The two ends disagree about cache layout, dtypes or checkpoint; retrying cannot help."""

    retryable = False


class WorkerLostError(Dsv4Error):
    """The worker that held the request died."""

    http_status = 503
    retryable = True


class NonFiniteLogitsError(Dsv4Error):
    """The model produced NaN or inf for this request; the engine goes on."""
