"""Who sent a request, as far as scheduling and cache isolation care."""

from dataclasses import dataclass
from typing import TypedDict


class RequestLabels(TypedDict):
    """The fields of a GenerationRequest that say whose it is."""

    key_name: str
    tenant: str
    cache_salt: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One client of the endpoint; `request.state.caller` of every HTTP request.

    key_name: name of the API key, for logs and metrics; empty without authentication.
    tenant: fairness and cached prefixes are kept apart between tenants.
    priority: lower runs first.
    """

    key_name: str = ""
    tenant: str = ""
    priority: int = 0

    def labels(self, user_id: str = "", priority: int = 0) -> RequestLabels:
        """user_id: the caller's own name for its end user, who is a tenant of their own within the caller's.

        priority: of the request, added to the caller's.
        """
        tenant = f"{self.tenant}/{user_id}" if user_id else self.tenant
        return {
            "key_name": self.key_name,
            "tenant": tenant,
            "cache_salt": user_id,
            "priority": self.priority + priority,
        }


ANONYMOUS = Caller()
