"""Limits of keys and tenants: requests in flight, and tokens per minute.

Tokens are charged as they come, prompt first, so a balance may fall below zero; requests are let in again once the
balance is positive. Counts belong to one router process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from dsv4_cluster.clock import Clock
from dsv4_cluster.config.api_config import ApiConfig, UsageLimits
from dsv4_cluster.errors import OverloadedError
from dsv4_cluster.frontend.caller import Caller
from dsv4_cluster.protocol.output import TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest

SECONDS_PER_MINUTE = 60.0


def places(limit: int, *, is_background: bool) -> int:
    """How many requests may be in flight. Work that nobody waits for leaves half of the places to others, if it can."""
    return max(1, limit // 2) if is_background else limit


class Quota:
    """What one key or tenant has used."""

    def __init__(self, label: str, limits: UsageLimits, clock: Clock) -> None:
        """label: how messages call the owner."""
        self._label = label
        self._limits = limits
        self._clock = clock
        self._num_in_flight = 0
        self._balance = float(limits.max_tokens_per_minute or 0)  # tokens
        self._settled_at_s = clock.now_s()

    def enter(self, *, is_background: bool) -> None:
        """Count one request in flight. Raises: OverloadedError at the limit, with the numbers."""
        limit = self._limits.max_concurrent_requests
        if limit is not None and self._num_in_flight >= places(limit, is_background=is_background):
            share = ", half of it for batches" if is_background else ""
            raise OverloadedError(
                f"{self._label} has {self._num_in_flight} requests in flight, its limit is {limit}{share}"
            )
        self._num_in_flight += 1

    def leave(self) -> None:
        """The request is over."""
        self._num_in_flight -= 1

    def check_tokens(self) -> None:
        """Raises: OverloadedError while more tokens were used than the limit grants, with the time until it ends."""
        per_minute = self._limits.max_tokens_per_minute
        if per_minute is None:
            return
        self._settle(per_minute)
        if self._balance <= 0:
            wait_s = (1 - self._balance) * SECONDS_PER_MINUTE / per_minute
            raise OverloadedError(
                f"{self._label} has used its {per_minute} tokens per minute; there is room again in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    def charge(self, num_tokens: int) -> None:
        """Count tokens."""
        per_minute = self._limits.max_tokens_per_minute
        if per_minute is not None:
            self._settle(per_minute)
            self._balance -= num_tokens

    def _settle(self, per_minute: int) -> None:
        """Grant what the time since the last call is worth; never more than a minute's."""
        now_s = self._clock.now_s()
        granted = (now_s - self._settled_at_s) * per_minute / SECONDS_PER_MINUTE
        self._balance = min(float(per_minute), self._balance + granted)
        self._settled_at_s = now_s


class Quotas:
    """Every key's and tenant's quota. Belongs to one event loop."""

    def __init__(self, config: ApiConfig, clock: Clock) -> None:
        self._of_key = {key.name: Quota(f"API key {key.name!r}", key.limits, clock) for key in config.keys}
        self._of_tenant = {name: Quota(f"tenant {name!r}", limits, clock) for name, limits in config.tenants.items()}

    def of(self, key_name: str, tenant: str) -> list[Quota]:
        """Those that a request counts against; none without authentication."""
        found = (self._of_key.get(key_name), self._of_tenant.get(tenant))
        return [quota for quota in found if quota is not None]

    def of_request(self, request: GenerationRequest) -> list[Quota]:
        """As `of`; end users of a tenant count for the tenant."""
        return self.of(request.key_name, request.tenant.partition("/")[0])

    @contextmanager
    def in_flight(self, caller: Caller, *, is_background: bool = False) -> Iterator[None]:
        """Count one request for the length of the block; is_background: see `places`. Raises: OverloadedError."""
        entered: list[Quota] = []
        try:
            for quota in self.of(caller.key_name, caller.tenant):
                quota.enter(is_background=is_background)
                entered.append(quota)
            yield
        finally:
            for quota in entered:
                quota.leave()


class QuotaObserver:
    """Charges a request's tokens to its key and tenant: the prompt when it starts, less what the cache held."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def started(self, request: GenerationRequest) -> None:
        """Raises: OverloadedError when the tokens of the last minute are used up."""
        quotas = self._quotas.of_request(request)
        for quota in quotas:
            quota.check_tokens()
        for quota in quotas:
            quota.charge(len(request.prompt_token_ids))

    def answered(self, request: GenerationRequest, chunk: TokenChunk, *, is_first: bool) -> None:
        """Charge generated tokens."""
        num_tokens = len(chunk.token_ids) - (chunk.num_cached_tokens if is_first else 0)
        for quota in self._quotas.of_request(request):
            quota.charge(num_tokens)

    def ended(self, request: GenerationRequest, failure: BaseException | None) -> None:
        """Nothing is charged for an end."""
