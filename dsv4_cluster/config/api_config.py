"""Settings of the HTTP surface: who may come in, how much each may ask for, and how strict bodies are read."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dsv4_cluster.config.base import Settings

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"


class UsageLimits(Settings):
    """Bounds on one key or one tenant, counted by each router process on its own; absent = unbounded."""

    max_concurrent_requests: int | None = Field(None, ge=1, description="requests in flight; above it 429")
    max_tokens_per_minute: int | None = Field(
        None, ge=1, description="prompt tokens plus generated ones, averaged over a minute; above it 429"
    )


class ApiKey(Settings):
    """One client. The key itself is never stored: `dsv4 make-key --name NAME` prints it once, with this entry."""

    name: str = Field(pattern=NAME_PATTERN, description="shown in logs")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal")
    tenant: str | None = Field(
        None, pattern=NAME_PATTERN, description="keys of one tenant share fairness and cached prefixes; default: name"
    )
    priority: int = Field(0, ge=-100, le=100, description="of the key's requests; lower runs first")
    limits: UsageLimits = UsageLimits()

    @property
    def tenant_name(self) -> str:
        """The tenant, which is the key's own name unless one is given."""
        return self.tenant or self.name


class ApiConfig(Settings):
    """What the HTTP front end of a router accepts."""

    keys: tuple[ApiKey, ...] = Field((), description="empty: everybody may come in, without a key")
    tenants: dict[str, UsageLimits] = Field({}, description="limits of a tenant, over all its keys")
    unknown_fields: Literal["reject", "ignore"] = Field(
        "reject", description="body fields that nothing here knows: 400 naming the field, or dropped"
    )
    keep_alive_s: float = Field(
        15.0, gt=0, description="an answer with nothing to say yet sends a sign of life this often"
    )
    sampling_while_thinking: Literal["official", "request"] = Field(
        "official",
        description="temperature and top_p while thinking: the model's own rule, or what the request asks for",
    )
    cors_allow_origins: tuple[str, ...] = Field((), description="origins of web pages that may call; empty: none")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [key.name for key in self.keys]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"keys: the name {name!r} is given to {names.count(name)} keys")
        hashes = [key.sha256 for key in self.keys]
        for key in self.keys:
            if hashes.count(key.sha256) > 1:
                raise ValueError(f"keys: {key.name!r} has the same sha256 as another key")
        unknown = sorted(set(self.tenants) - {key.tenant_name for key in self.keys})
        if unknown:
            raise ValueError(f"tenants: no key belongs to {unknown}")
        return self
