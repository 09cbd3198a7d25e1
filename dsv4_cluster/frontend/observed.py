"""A GenerationService that tells observers what happens to each request: quotas and metrics listen here."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.services import GenerationService


class Observer(Protocol):
    """Hears of every generation in this process, on the event loop; must not block."""

    def started(self, request: GenerationRequest) -> None:
        """Before the service is asked. What it raises ends the request, and no other observer hears of it."""
        ...

    def answered(self, request: GenerationRequest, chunk: TokenChunk, *, is_first: bool) -> None:
        """One chunk came."""
        ...

    def ended(self, request: GenerationRequest, failure: BaseException | None) -> None:
        """After the last chunk, an error, or an abort (GeneratorExit or CancelledError)."""
        ...


class ObservedService:
    """The service behind it, observed."""

    def __init__(self, service: GenerationService, observers: Sequence[Observer]) -> None:
        """observers: those that may refuse a request come first."""
        self._service = service
        self._observers = tuple(observers)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """See GenerationService."""
        for observer in self._observers:
            observer.started(request)
        is_first = True
        failure: BaseException | None = None
        try:
            async with aclosing(self._service.generate(request)) as chunks:
                async for chunk in chunks:
                    for observer in self._observers:
                        observer.answered(request, chunk, is_first=is_first)
                    is_first = False
                    yield chunk
        except BaseException as err:
            failure = err
            raise
        finally:
            for observer in self._observers:
                observer.ended(request, failure)

    def model_names(self) -> Sequence[str]:
        """See GenerationService."""
        return self._service.model_names()

    async def unready_reasons(self) -> Sequence[str]:
        """See GenerationService."""
        return await self._service.unready_reasons()
